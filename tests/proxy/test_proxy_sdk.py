"""The proxy as the vendor's own client sees it."""

import json
from typing import Any

import anyio.to_thread
import httpx
import openai
import pytest
from proxy_cases import BASH, Served, bash, echo, serving

from clawgym_env.calls import Message, Outcome, Reply
from clawgym_env.policies import FunctionPolicy, ScriptedPolicy
from clawgym_env.store import CaptureStore

pytestmark = pytest.mark.anyio

COMMANDS = ["ls", "cat a.txt", "wc -c a.txt", "echo 'ü' > b.txt"]
SCRIPT = [bash(f"call_{i}", command) for i, command in enumerate(COMMANDS)]
SCRIPT.append(Message("assistant", "All done: b.txt holds the answer."))


def converse(client: openai.OpenAI, *, stream: bool) -> list[dict[str, Any]]:
    """Play a harness: run the "tool" until the model stops, and return the conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do the task."}]
    while True:
        arguments: dict[str, Any] = {"model": "clawgym", "messages": messages, "tools": [BASH]}
        if stream:
            with client.chat.completions.stream(
                **arguments, stream_options={"include_usage": True}
            ) as events:
                for _ in events:
                    pass
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**arguments).choices[0]
        reply = choice.message
        messages.append(reply.model_dump(exclude_none=True, include={"role", "content"}))
        if choice.finish_reason == "stop":
            return messages
        assert choice.finish_reason == "tool_calls"
        messages[-1]["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in reply.tool_calls or ()
        ]
        for call in reply.tool_calls or ():
            command = json.loads(call.function.arguments)["command"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"ran {command}"})


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.api, api_key=served.key, max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_conversation_of_five_turns(store: CaptureStore, stream: bool) -> None:
    async with serving(ScriptedPolicy(SCRIPT), store=store) as served:
        with client_of(served) as client:
            messages = await anyio.to_thread.run_sync(lambda: converse(client, stream=stream))
        calls = await served.proxy.seal("rollout-1")
    assert messages[-1]["content"] == "All done: b.txt holds the answer."
    ran = [m["content"] for m in messages if m["role"] == "tool"]
    assert ran == [f"ran {command}" for command in COMMANDS]
    assert [c.call.index for c in calls] == [0, 1, 2, 3, 4]
    assert [len(c.call.messages) for c in calls] == [1, 3, 5, 7, 9]
    assert [c.completion.message for c in calls] == SCRIPT
    assert [c.completion.finish_reason for c in calls] == ["tool_calls"] * 4 + ["stop"]
    assert all(c.delivered and c.call.stream is stream for c in calls)
    assert store.rollout("rollout-1").calls == calls


async def test_the_async_client_gets_the_same(store: CaptureStore) -> None:
    async with serving(FunctionPolicy(echo), store=store) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            whole = await client.chat.completions.create(
                model="clawgym", messages=[{"role": "user", "content": "one"}]
            )
            text = ""
            async for chunk in await client.chat.completions.create(
                model="clawgym", messages=[{"role": "user", "content": "two"}], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            raw = await client.chat.completions.with_raw_response.create(
                model="clawgym", messages=[{"role": "user", "content": "three"}]
            )
    assert whole.choices[0].message.content == "rollout-1: one"
    assert text == "rollout-1: two"
    assert raw.headers["x-request-id"] == served.settled[2].call.call_id
    assert [c.delivered for c in served.settled] == [True, True, True]


async def test_the_text_format_of_a_reply_becomes_tool_calls() -> None:
    text = 'Looking.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    async with serving(ScriptedPolicy([text, "<tool_call>no json</tool_call>"])) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            first, second = [
                (
                    await client.chat.completions.create(
                        model="clawgym", messages=[{"role": "user", "content": "go"}]
                    )
                ).choices[0]
                for _ in range(2)
            ]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls is not None
    call = first.message.tool_calls[0]
    assert call.type == "function" and json.loads(call.function.arguments) == {"command": "ls"}
    assert (second.finish_reason, second.message.tool_calls) == ("stop", None)
    assert second.message.content == "<tool_call>no json</tool_call>"
    assert served.settled[0].completion.parse_error is None
    assert served.settled[1].completion.parse_error is not None


async def test_models_are_listed(store: CaptureStore) -> None:
    async with serving(FunctionPolicy(echo), models=("small", "large")) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            assert [m.id async for m in await client.models.list()] == ["small", "large"]


async def test_unknown_model_names_the_near_one() -> None:
    async with serving(FunctionPolicy(echo)) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            with pytest.raises(openai.NotFoundError, match="did you mean 'clawgym'") as caught:
                await client.chat.completions.create(
                    model="clawgim", messages=[{"role": "user", "content": "x"}]
                )
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert served.session.calls == 0


async def test_any_model_name_with_the_wildcard() -> None:
    async with serving(FunctionPolicy(echo), models=("*",)) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            reply = await client.chat.completions.create(
                model="gpt-9", messages=[{"role": "user", "content": "x"}]
            )
    assert reply.model == "gpt-9"
    assert served.settled[0].call.model == "gpt-9"


@pytest.mark.parametrize("key", ["wrong", "rollout-1"])
async def test_an_unknown_key_is_an_authentication_error(key: str) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=key) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
            assert caught.value.code == "invalid_api_key"
            assert key not in caught.value.message
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(
                    model="clawgym", messages=[{"role": "user", "content": "x"}], stream=True
                )


async def test_limits_end_the_rollout_once_and_without_retries() -> None:
    limits: list[Outcome] = []
    async with serving(FunctionPolicy(echo), max_calls=2, on_limit=limits.append) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            for index in range(5):
                try:
                    await client.chat.completions.create(
                        model="clawgym", messages=[{"role": "user", "content": str(index)}]
                    )
                except openai.RateLimitError as error:
                    assert index >= 2 and error.code == "rollout_limit"
    assert limits == [Outcome.CALL_LIMIT]
    assert served.session.limit is Outcome.CALL_LIMIT
    assert [c.call.messages[0].text for c in served.settled] == ["0", "1"]


@pytest.mark.parametrize("keepalive_s", [30.0, 0.01])
async def test_a_failing_policy_is_a_server_error_in_whole_and_streamed_replies(
    keepalive_s: float,
) -> None:
    async def fail(request: object) -> Reply:
        await anyio.sleep(0.05)
        raise ZeroDivisionError("the engine broke")

    async with serving(FunctionPolicy(fail), keepalive_s=keepalive_s) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            for stream in (False, True):
                with pytest.raises(openai.APIError, match="the engine broke"):
                    answer = await client.chat.completions.create(
                        model="clawgym",
                        messages=[{"role": "user", "content": "x"}],
                        stream=stream,  # type: ignore[call-overload]
                    )
                    async for _ in answer:
                        pass
    assert served.session.calls == 2
    assert served.session.failure == (
        Outcome.POLICY_ERROR,
        "ZeroDivisionError: the engine broke",
    )
    assert served.session.captured == ()


async def test_a_stream_is_kept_alive_while_the_policy_thinks() -> None:
    async def slowly(request: object) -> str:
        await anyio.sleep(0.1)
        return "at last"

    async with serving(FunctionPolicy(slowly), keepalive_s=0.01) as served:
        body = {"model": "clawgym", "messages": [{"role": "user", "content": "x"}], "stream": True}
        headers = {"authorization": f"Bearer {served.key}"}
        async with httpx.AsyncClient() as client:
            raw = await client.post(f"{served.api}/chat/completions", json=body, headers=headers)
        events = raw.text.split("\n\n")
        assert events.count(": keep-alive") >= 2
        assert events[-2:] == ["data: [DONE]", ""]
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as sdk:
            text = ""
            async for chunk in await sdk.chat.completions.create(
                model="clawgym", messages=[{"role": "user", "content": "x"}], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
    assert text == "at last"
    assert [c.delivered for c in served.settled] == [True, True]
