"""Token ids through the proxy: prompts, splices, parents, failures of the template."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from proxy_cases import BASH, Served, serving

from clawgym_env.calls import Message, ModelCall, Outcome, PolicyRequest, Reply, Rollout, ToolCall
from clawgym_env.errors import ConfigError
from clawgym_env.policies import FunctionPolicy, ReplayPolicy, ScriptedPolicy, StepPolicy
from clawgym_env.proxy import Session
from clawgym_env.rendering import Renderer
from clawgym_env.store import CaptureStore

pytestmark = pytest.mark.anyio


class Sampler:
    """A stand-in engine: ids that the template would never write, and a logprob for each."""

    def __init__(self, renderer: Renderer, texts: list[str]) -> None:
        self._renderer = renderer
        self._texts = texts
        self.requests: list[PolicyRequest] = []

    async def complete(self, request: PolicyRequest) -> Reply:
        text = self._texts[len(self.requests)]
        self.requests.append(request)
        ids = (*self._renderer.encode(text), self._renderer.stop_ids[0])
        return Reply(token_ids=ids, logprobs=tuple(-0.01 * i for i in range(len(ids))))


SPACED = '<tool_call>\n{"arguments": {"command":   "ls"},\n "name": "bash"}\n</tool_call>'
"""Means what the template writes in another order and spacing."""


async def converse(served: Served, turns: int) -> list[dict[str, Any]]:
    """A harness that reserialises the arguments of tool calls before it sends them back."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
        for _ in range(turns):
            reply = await client.chat.completions.create(
                model="clawgym",
                messages=messages,  # type: ignore[arg-type]
                tools=[BASH],  # type: ignore[list-item]
                logprobs=True,
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in messages[-1].get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, indent=1)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"})
    return messages


async def test_each_prompt_extends_what_was_sampled(
    renderer: Renderer, store: CaptureStore
) -> None:
    policy = Sampler(renderer, [SPACED, SPACED, "Done."])
    async with serving(policy, store=store, renderer=renderer) as served:
        await converse(served, turns=3)
        first, second, third = await served.proxy.seal("rollout-1")
    assert first.prompt_ids == policy.requests[0].prompt_ids
    assert renderer.decode(first.prompt_ids or ()).endswith("<|im_start|>assistant\n")
    assert (first.extends, first.parent_id, first.drift) == (False, None, None)
    for parent, child in ((first, second), (second, third)):
        assert (child.extends, child.parent_id, child.drift) == (True, parent.call.call_id, None)
        assert child.prompt_ids is not None
        assert child.prompt_ids[: len(parent.sequence)] == parent.sequence
    assert served.session.sampled_tokens == sum(
        len(c.completion.token_ids or ()) for c in (first, second, third)
    )
    assert store.rollout("rollout-1").calls == (first, second, third)


async def test_usage_and_logprobs_are_those_of_the_ids(renderer: Renderer) -> None:
    policy = Sampler(renderer, ["Hi."])
    async with serving(policy, renderer=renderer) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            reply = await client.chat.completions.create(
                model="clawgym", messages=[{"role": "user", "content": "go"}], logprobs=True
            )
    prompt_ids = policy.requests[0].prompt_ids
    assert reply.usage is not None and prompt_ids is not None
    assert reply.usage.prompt_tokens == len(prompt_ids)
    assert reply.usage.completion_tokens == 4
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [t.token for t in logprobs.content] == ["H", "i", ".", "<|im_end|>"]
    assert [t.logprob for t in logprobs.content] == [-0.0, -0.01, -0.02, -0.03]


async def test_scripted_messages_are_captured_with_ids_and_without_logprobs(
    renderer: Renderer,
) -> None:
    calls = (ToolCall("call_1", "bash", '{"command": "ls"}'),)
    script = [Message("assistant", None, tool_calls=calls), Message("assistant", "Done.")]
    async with serving(ScriptedPolicy(script), renderer=renderer) as served:
        await converse(served, turns=2)
        first, second = await served.proxy.seal("rollout-1")
    assert first.completion.token_ids == renderer.encode_reply(script[0])
    assert first.completion.logprobs is None
    assert second.extends and second.parent_id == first.call.call_id


async def test_a_captured_rollout_replays_id_by_id(renderer: Renderer) -> None:
    policy = Sampler(renderer, [SPACED, SPACED, "Done."])
    async with serving(policy, renderer=renderer) as served:
        await converse(served, turns=3)
        calls = await served.proxy.seal("rollout-1")
        captured = Rollout("rollout-1", "task", "test", Outcome.COMPLETED, calls=calls)
        session = Session("rollout-2", ReplayPolicy(captured), renderer=renderer)
        served.key = served.proxy.register(session)
        await converse(served, turns=3)
        again = await served.proxy.seal("rollout-2")
    assert [c.sequence for c in again] == [c.sequence for c in calls]
    assert [c.completion.logprobs for c in again] == [c.completion.logprobs for c in calls]


async def test_parallel_calls_are_rendered_on_arrival(renderer: Renderer) -> None:
    policy = StepPolicy()
    async with serving(policy, renderer=renderer) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            asked = [
                asyncio.ensure_future(
                    client.chat.completions.create(
                        model="clawgym", messages=[{"role": "user", "content": f"no {i}"}]
                    )
                )
                for i in range(3)
            ]
            await served.until(lambda: len(policy.pending) == 3)
            assert served.session.in_flight == 3
            for request in reversed(policy.pending):
                assert request.prompt_ids is not None
                said = request.call.messages[0].text
                assert said in renderer.decode(request.prompt_ids)
                policy.answer(request.call.call_id, Reply(text=f"to {said}"))
            replies = [(await a).choices[0].message.content for a in asked]
        calls = await served.proxy.seal("rollout-1")
    assert replies == ["to no 0", "to no 1", "to no 2"]
    assert [c.call.index for c in calls] == [0, 1, 2]


async def test_a_conversation_that_the_template_refuses(renderer: Renderer) -> None:
    async with serving(FunctionPolicy(lambda request: "x"), renderer=renderer) as served:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {"model": "clawgym", "messages": [{"role": "user", "content": [image]}]}
        headers = {"authorization": f"Bearer {served.key}"}
        async with httpx.AsyncClient() as client:
            url = f"{served.api}/chat/completions"
            response = await client.post(url, json=body, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("render_error", "messages")
    assert served.session.failure is not None
    assert served.session.failure[0] is Outcome.POLICY_ERROR
    assert served.session.calls == 0


async def test_token_limit_counts_what_was_sampled(renderer: Renderer) -> None:
    limits: list[Outcome] = []
    async with serving(
        ScriptedPolicy(["ab", "cd", "ef"]),
        renderer=renderer,
        max_tokens=6,
        on_limit=limits.append,
    ) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            for _ in range(2):
                await client.chat.completions.create(
                    model="clawgym", messages=[{"role": "user", "content": "x"}]
                )
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(
                    model="clawgym", messages=[{"role": "user", "content": "x"}]
                )
    assert served.session.sampled_tokens == 6  # two letters and a stop token, twice
    assert limits == [Outcome.TOKEN_LIMIT]


async def test_kinds_come_from_the_adapter() -> None:
    def classify(call: ModelCall) -> str:
        return "auxiliary" if "title" in call.messages[0].text else "main"

    policy = ScriptedPolicy(["main reply"], auxiliary="A title")
    async with serving(policy, classify=classify) as served:
        async with openai.AsyncOpenAI(base_url=served.api, api_key=served.key) as client:
            for text in ("write a title", "do the task"):
                await client.chat.completions.create(
                    model="clawgym", messages=[{"role": "user", "content": text}]
                )
        calls = await served.proxy.seal("rollout-1")
    assert [(c.call.kind, c.completion.message.text) for c in calls] == [
        ("auxiliary", "A title"),
        ("main", "main reply"),
    ]


def test_a_conversation_needs_its_renderer(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="no renderer"):
        Session("r", StepPolicy(), conversation=renderer.conversation())
