from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel

from clawgym_env.calls import (
    Completion,
    FinishReason,
    Message,
    ModelCall,
    Sampling,
    TextPart,
    ToolCall,
)
from clawgym_env.errors import PolicyError, ProtocolError
from clawgym_env.protocols import openai_chat

CALL = ModelCall(
    call_id="c1",
    rollout_id="r",
    index=0,
    protocol="openai_chat",
    model="clawgym",
    messages=(Message("user", "hi"),),
    arrived_at=1_700_000_000.25,
)
TOOL_CALLS = (ToolCall("call_a", "bash", '{"command": "ls"}'), ToolCall("call_b", "finish", "{"))
TEXT = Completion(Message("assistant", "Hello there."), "stop", finished_at=1_700_000_001.5)
TOOLS = Completion(
    Message("assistant", None, "I look first.", TOOL_CALLS),
    "stop",
    token_ids=(5, 6, 7),
    logprobs=(-0.5, float("-inf"), -0.25),
    policy_version=4,
)
ASKED = replace(CALL, sampling=Sampling(logprobs=True))


def strictly(kind: type[BaseModel], body: bytes) -> Any:
    """The body as the vendor's type; refuses wrong types and fields that the vendor lacks."""
    value = kind.model_validate_json(body, strict=True)
    assert extras(value) <= {"reasoning_content"}
    return value


def extras(value: Any) -> set[str]:
    found: set[str] = set()
    if isinstance(value, BaseModel):
        found |= set(value.model_extra or {})
        for _, inner in value:
            found |= extras(inner)
    elif isinstance(value, list):
        for inner in value:
            found |= extras(inner)
    return found


def chunks(call: ModelCall, completion: Completion, **kwargs: Any) -> list[ChatCompletionChunk]:
    events = list(openai_chat.stream(call, completion, **kwargs))
    assert all(e.startswith(b"data: ") and e.endswith(b"\n\n") for e in events)
    assert all(e.count(b"\n") == 2 for e in events)
    assert events[-1] == b"data: [DONE]\n\n"
    return [strictly(ChatCompletionChunk, e[len(b"data: ") :]) for e in events[:-1]]


def test_a_text_reply() -> None:
    reply = strictly(ChatCompletion, openai_chat.render(CALL, TEXT, prompt_tokens=9))
    assert (reply.id, reply.created, reply.model) == ("chatcmpl-c1", 1_700_000_001, "clawgym")
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there.", "stop")
    assert choice.message.tool_calls is None
    assert choice.logprobs is None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (9, 0)
    assert reply.usage.total_tokens == 9


def test_a_reply_with_tool_calls_and_reasoning() -> None:
    reply = strictly(ChatCompletion, openai_chat.render(CALL, TOOLS, prompt_tokens=9))
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.reasoning_content == "I look first."
    assert [
        (c.id, c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls
    ] == [
        ("call_a", "function", "bash", '{"command": "ls"}'),
        ("call_b", "function", "finish", "{"),
    ]
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 12)
    assert reply.system_fingerprint == "policy-4"
    assert reply.created == 1_700_000_000


@pytest.mark.parametrize(
    ("content", "calls", "sent"),
    [
        (None, (), ""),
        ("", (), ""),
        ("", TOOL_CALLS, None),
        ("so", TOOL_CALLS, "so"),
        ((TextPart("a"), TextPart("b")), (), "ab"),
    ],
)
def test_the_content_on_the_wire(
    content: Any, calls: tuple[ToolCall, ...], sent: str | None
) -> None:
    completion = Completion(Message("assistant", content, tool_calls=calls), "stop")
    reply = strictly(ChatCompletion, openai_chat.render(CALL, completion))
    assert reply.choices[0].message.content == sent


@pytest.mark.parametrize(
    ("ended", "calls", "sent"),
    [
        ("stop", (), "stop"),
        ("stop", TOOL_CALLS, "tool_calls"),
        ("tool_calls", TOOL_CALLS, "tool_calls"),
        ("tool_calls", (), "stop"),
        ("length", (), "length"),
        ("length", TOOL_CALLS, "length"),
        ("content_filter", (), "content_filter"),
    ],
)
def test_finish_reasons(ended: FinishReason, calls: tuple[ToolCall, ...], sent: str) -> None:
    completion = Completion(Message("assistant", "x", tool_calls=calls), ended)
    reply = strictly(ChatCompletion, openai_chat.render(CALL, completion))
    assert reply.choices[0].finish_reason == sent
    assert chunks(CALL, completion)[-1].choices[0].finish_reason == sent


def test_logprobs_when_asked_and_known() -> None:
    body = openai_chat.render(ASKED, TOOLS, token_texts=("I", "\ufffd", "é"))
    given_ = strictly(ChatCompletion, body).choices[0].logprobs
    assert [(t.token, t.bytes, t.logprob, t.top_logprobs) for t in given_.content] == [
        ("I", [73], -0.5, []),
        ("\ufffd", None, -9999.0, []),
        ("é", [195, 169], -0.25, []),
    ]
    streamed = chunks(ASKED, TOOLS, token_texts=("I", "\ufffd", "é"))
    assert [c.choices[0].logprobs for c in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].choices[0].logprobs.content == given_.content


@pytest.mark.parametrize(
    ("call", "completion", "texts"),
    [
        (CALL, TOOLS, ("a", "b", "c")),  # not asked
        (ASKED, TOOLS, None),  # no tokenizer
        (ASKED, TEXT, ("a", "b", "c")),  # not sampled
    ],
)
def test_logprobs_are_null_otherwise(
    call: ModelCall, completion: Completion, texts: tuple[str, ...] | None
) -> None:
    body = openai_chat.render(call, completion, token_texts=texts)
    assert orjson.loads(body)["choices"][0]["logprobs"] is None


def test_logprobs_and_texts_must_agree() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        openai_chat.render(ASKED, TOOLS, token_texts=("a",))


def test_a_stream_in_order() -> None:
    call = replace(CALL, stream=True, include_usage=True)
    message = replace(TOOLS.message, content="x" * 1300)
    got = chunks(call, replace(TOOLS, message=message), prompt_tokens=9)
    deltas = [c.choices[0].delta for c in got[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert deltas[1].reasoning_content == "I look first."
    assert [len(d.content or "") for d in deltas[2:5]] == [512, 512, 276]
    assert [d.tool_calls[0].index for d in deltas[5:7] if d.tool_calls] == [0, 1]
    assert deltas[7].model_dump(exclude_unset=True) == {}
    assert [c.choices[0].finish_reason for c in got[:-1]] == [None] * 7 + ["tool_calls"]
    assert [c.usage for c in got[:-1]] == [None] * 8
    assert b'"usage":null' in next(openai_chat.stream(call, TOOLS))
    assert got[-1].choices == []
    assert got[-1].usage is not None
    assert got[-1].usage.model_dump(exclude_none=True) == {
        "completion_tokens": 3,
        "prompt_tokens": 9,
        "total_tokens": 12,
    }
    assert len({(c.id, c.created, c.model) for c in got}) == 1


def test_no_usage_chunk_unless_asked() -> None:
    assert all(c.usage is None and c.choices for c in chunks(CALL, TEXT))


TEXTS = st.text(max_size=1200)
MESSAGES = st.builds(
    Message,
    role=st.just("assistant"),
    content=st.none() | TEXTS,
    reasoning=st.none() | TEXTS,
    tool_calls=st.lists(st.builds(ToolCall, TEXTS, TEXTS, TEXTS), max_size=3).map(tuple),
)


@given(MESSAGES, st.sampled_from(["stop", "length"]), st.booleans())
def test_a_stream_adds_up_to_the_reply(message: Message, ended: Any, usage: bool) -> None:
    call = replace(CALL, include_usage=usage)
    completion = Completion(message, ended)
    reply = strictly(ChatCompletion, openai_chat.render(call, completion)).choices[0]
    got = [c.choices[0] for c in chunks(call, completion) if c.choices]
    assert "".join(c.delta.content or "" for c in got) == (reply.message.content or "")
    reasoning = "".join(getattr(c.delta, "reasoning_content", None) or "" for c in got)
    assert reasoning == (message.reasoning or "")
    calls = [t for c in got for t in c.delta.tool_calls or []]
    assert [(t.id, t.function.name, t.function.arguments) for t in calls if t.function] == [
        (t.id, t.name, t.arguments) for t in message.tool_calls
    ]
    assert got[-1].finish_reason == reply.finish_reason


def test_text_that_json_cannot_carry_is_the_policys_error() -> None:
    completion = Completion(Message("assistant", "\ud800"), "stop")
    with pytest.raises(PolicyError, match="Unicode"):
        openai_chat.render(CALL, completion)
    with pytest.raises(PolicyError, match="Unicode"):
        openai_chat.stream(CALL, completion)  # before the first event


def test_errors_and_models() -> None:
    exc = ProtocolError(404, "no model 'x'", param="model", code="model_not_found")
    body = orjson.loads(openai_chat.error(exc))
    assert set(body) == {"error"}
    got = strictly(ErrorObject, orjson.dumps(body["error"]))
    assert (got.message, got.param, got.code) == ("no model 'x'", "model", "model_not_found")
    assert got.type == "invalid_request_error"

    listed = orjson.loads(openai_chat.models(["clawgym", "other"]))
    assert listed["object"] == "list"
    ids = [strictly(Model, orjson.dumps(m)).id for m in listed["data"]]
    assert ids == ["clawgym", "other"]


# --- the vendor's client over a real connection ---------------------------------------------


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    """The SDK's client against a server that answers with this module's bytes."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k", max_retries=0
        ) as sdk:
            yield sdk
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, "application/json", openai_chat.models(["clawgym"]))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            call = openai_chat.parse(body, rollout_id="r", call_id="c", index=0, arrived_at=1.0)
        except ProtocolError as exc:
            self._answer(exc.status, "application/json", openai_chat.error(exc))
            return
        if not call.stream:
            self._answer(200, "application/json", openai_chat.render(call, TOOLS))
            return
        events = [openai_chat.keepalive(), *openai_chat.stream(call, TOOLS, prompt_tokens=2)]
        if call.messages[0].text == "break":
            failure = ProtocolError(500, "the policy broke", kind="server_error")
            events[2:] = [openai_chat.stream_error(failure)]
        self._answer(200, "text/event-stream", b"".join(events))

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_the_vendors_client_reads_replies_streams_and_errors(client: openai.OpenAI) -> None:
    ask = client.chat.completions.create
    reply = ask(model="clawgym", messages=[{"role": "user", "content": "hi"}])
    assert [c.id for c in reply.choices[0].message.tool_calls or ()] == ["call_a", "call_b"]

    with client.chat.completions.stream(
        model="clawgym",
        messages=[{"role": "user", "content": "hi"}],
        stream_options={"include_usage": True},
    ) as streamed:
        final = streamed.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
        (c.id, c.name, c.arguments) for c in TOOL_CALLS
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None
    assert final.usage.total_tokens == 5

    with pytest.raises(openai.BadRequestError) as refused:
        ask(model="clawgym", messages=[{"role": "user", "content": "hi"}], n=2)
    assert (refused.value.param, refused.value.code) == ("n", "unsupported_value")

    with pytest.raises(openai.APIError, match="the policy broke"):
        list(ask(model="clawgym", messages=[{"role": "user", "content": "break"}], stream=True))

    assert [m.id for m in client.models.list()] == ["clawgym"]
