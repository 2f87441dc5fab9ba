from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.calls import ImagePart, Message, ModelCall, Sampling, TextPart, Tool, ToolCall
from clawgym_env.errors import ProtocolError, UnknownNameError
from clawgym_env.protocols import PROTOCOLS, get_protocol, openai_chat

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}


def parse(body: bytes | dict[str, Any]) -> ModelCall:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return openai_chat.parse(raw, rollout_id="r", call_id="c", index=3, arrived_at=1.5)


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def message(**fields: Any) -> dict[str, Any]:
    return request(messages=[fields])


def test_a_whole_request_in_canonical_form() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
    body = request(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "Be exact."}]},
            {
                "role": "user",
                "name": "ann",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                ],
            },
            {"role": "assistant", "reasoning_content": "hm", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
        ],
        tools=[tool],
        tool_choice="auto",
        temperature=1,
        top_p=0.9,
        top_k=40,
        max_completion_tokens=64,
        max_tokens=128,
        stop=["END", "\n\n"],
        seed=7,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        a_field_nobody_knows={"x": [1, None]},
    )
    raw = orjson.dumps(body)
    assert parse(raw) == ModelCall(
        call_id="c",
        rollout_id="r",
        index=3,
        protocol="openai_chat",
        model="m",
        messages=(
            Message("system", "Be brief."),
            Message("developer", (TextPart("Be exact."),)),
            Message(
                "user",
                (TextPart("What is it?"), ImagePart("data:image/png;base64,AA==")),
                name="ann",
            ),
            Message("assistant", None, "hm", (ToolCall("call_1", "bash", "{}"),)),
            Message("tool", "ok", tool_call_id="call_1"),
        ),
        tools=(Tool("bash", "Run a command.", tool["function"]["parameters"]),),
        tool_choice="auto",
        sampling=Sampling(
            temperature=1.0,
            top_p=0.9,
            top_k=40,
            max_tokens=64,
            stop=("END", "\n\n"),
            seed=7,
            presence_penalty=-1.5,
            frequency_penalty=0.5,
            logprobs=True,
            top_logprobs=2,
        ),
        stream=True,
        include_usage=True,
        raw=raw,
        arrived_at=1.5,
    )


def test_the_least_request_and_nulls_mean_the_defaults() -> None:
    least = parse(request())
    assert least.sampling == Sampling()
    assert (least.tools, least.tool_choice, least.stream, least.include_usage) == (
        (),
        None,
        False,
        False,
    )
    optional = (
        "tools tool_choice temperature top_p top_k max_tokens max_completion_tokens stop seed "
        "presence_penalty frequency_penalty logprobs top_logprobs n stream stream_options "
        "functions function_call"
    )
    nulls = parse(request(**dict.fromkeys(optional.split())))
    assert (nulls.sampling, nulls.tools, nulls.stream) == (Sampling(), (), False)


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"max_tokens": 5}, Sampling(max_tokens=5)),
        ({"stop": "END"}, Sampling(stop=("END",))),
        ({"stop": []}, Sampling()),
        ({"top_k": -1}, Sampling()),
        ({"n": 1}, Sampling()),
    ],
)
def test_other_forms_of_sampling_fields(fields: dict[str, Any], seen: Sampling) -> None:
    assert parse(request(**fields)).sampling == seen


@pytest.mark.parametrize(
    ("wire", "seen"),
    [
        ({"role": "assistant"}, Message("assistant")),
        ({"role": "assistant", "content": ""}, Message("assistant", "")),
        (
            {"role": "assistant", "content": "a", "reasoning": "b"},
            Message("assistant", "a", reasoning="b"),
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": {"effort": 1}, "tool_calls": None},
            Message("assistant", "a"),
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            Message("assistant", (TextPart("no"),)),
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "", "function": {"name": "f", "arguments": "{not json"}}],
            },
            Message("assistant", tool_calls=(ToolCall("", "f", "{not json"),)),
        ),
    ],
)
def test_other_forms_of_messages(wire: dict[str, Any], seen: Message) -> None:
    assert parse(request(messages=[wire])).messages == (seen,)


def test_a_tool_without_description_and_a_named_choice() -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    call = parse(
        request(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=choice)
    )
    assert call.tools == (Tool("f"),)
    assert call.tool_choice == choice


DEEP = b"[" * 400 + b"]" * 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b'{"model": "m", ', None),
        (b'{"model": "\xff\xfe"}', None),
        (b'{"model": "\\ud800"}', None),
        (b"[" * 5000 + b"]" * 5000, None),
        (b'{"temperature": 1e999}', None),
        (b"[]", None),
        (b'"hello"', None),
        (b"null", None),
        ({"messages": [USER]}, "model"),
        (request(model=3), "model"),
        (request(model=""), "model"),
        ({"model": "m"}, "messages"),
        (request(messages={"role": "user"}), "messages"),
        (request(messages="hi"), "messages"),
        (request(messages=[]), "messages"),
        (request(messages=None), "messages"),
        (request(messages=[USER, "hi"]), "messages[1]"),
        (message(content="hi"), "messages[0].role"),
        (message(role="robot", content="hi"), "messages[0].role"),
        (message(role=["user"], content="hi"), "messages[0].role"),
        (message(role="function", name="f", content="hi"), "messages[0].role"),
        (message(role="user"), "messages[0].content"),
        (message(role="user", content=None), "messages[0].content"),
        (message(role="user", content=7), "messages[0].content"),
        (message(role="user", content={"type": "text"}), "messages[0].content"),
        (message(role="user", content=["hi"]), "messages[0].content[0]"),
        (message(role="user", content=[{"text": "hi"}]), "messages[0].content[0].type"),
        (
            message(role="user", content=[{"type": "input_audio", "input_audio": {}}]),
            "messages[0].content[0].type",
        ),
        (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
        (
            message(role="user", content=[{"type": "image_url", "image_url": "x"}]),
            "messages[0].content[0].image_url",
        ),
        (
            message(role="user", content=[{"type": "image_url", "image_url": {}}]),
            "messages[0].content[0].image_url.url",
        ),
        (message(role="user", content="hi", name=1), "messages[0].name"),
        (message(role="tool", content="ok"), "messages[0].tool_call_id"),
        (message(role="assistant", tool_calls={}), "messages[0].tool_calls"),
        (message(role="assistant", tool_calls=["x"]), "messages[0].tool_calls[0]"),
        (
            message(role="assistant", tool_calls=[CALL, {"id": "call_2", "type": "function"}]),
            "messages[0].tool_calls[1].function",
        ),
        (
            message(role="assistant", tool_calls=[{"id": "a", "type": "custom", "custom": {}}]),
            "messages[0].tool_calls[0].type",
        ),
        (
            message(role="assistant", tool_calls=[{"function": CALL["function"]}]),
            "messages[0].tool_calls[0].id",
        ),
        (
            message(
                role="assistant", tool_calls=[{"id": "a", "function": {"name": 1, "arguments": ""}}]
            ),
            "messages[0].tool_calls[0].function.name",
        ),
        (
            message(
                role="assistant",
                tool_calls=[{"id": "a", "function": {"name": "f", "arguments": {}}}],
            ),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (message(role="assistant", function_call={"name": "f"}), "messages[0].function_call"),
        (request(functions=[{"name": "f"}]), "functions"),
        (request(function_call="auto"), "function_call"),
        (request(temperature="hot"), "temperature"),
        (request(temperature=True), "temperature"),
        (request(temperature=2.5), "temperature"),
        (request(temperature=-0.1), "temperature"),
        (request(top_p=[]), "top_p"),
        (request(top_k=1.5), "top_k"),
        (request(max_tokens="64"), "max_tokens"),
        (request(max_tokens=64.0), "max_tokens"),
        (request(max_tokens=True), "max_tokens"),
        (request(max_tokens=0), "max_tokens"),
        (request(max_completion_tokens=-1), "max_completion_tokens"),
        (request(stop=3), "stop"),
        (request(stop=["a", 3]), "stop"),
        (request(stop=""), "stop"),
        (request(stop={"a": 1}), "stop"),
        (request(seed="x"), "seed"),
        (request(presence_penalty=9), "presence_penalty"),
        (request(frequency_penalty="x"), "frequency_penalty"),
        (request(logprobs=1), "logprobs"),
        (request(top_logprobs=21), "top_logprobs"),
        (request(stream="yes"), "stream"),
        (request(stream_options=[]), "stream_options"),
        (request(stream_options={"include_usage": 1}), "stream_options.include_usage"),
        (request(tools={}), "tools"),
        (request(tools=["bash"]), "tools[0]"),
        (request(tools=[{"type": "function"}]), "tools[0].function"),
        (request(tools=[{"type": "web_search"}]), "tools[0].type"),
        (request(tools=[{"function": {}}]), "tools[0].function.name"),
        (request(tools=[{"function": {"name": ""}}]), "tools[0].function.name"),
        (
            request(tools=[{"function": {"name": "f", "description": 1}}]),
            "tools[0].function.description",
        ),
        (
            request(tools=[{"function": {"name": "f", "parameters": []}}]),
            "tools[0].function.parameters",
        ),
        (
            b'{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":' + DEEP + b"}",
            "tools",
        ),
        (
            b'{"model":"m","messages":[{"role":"user","content":"hi"}],"tool_choice":{"a":'
            + DEEP
            + b"}}",
            "tool_choice",
        ),
        (request(tool_choice="always"), "tool_choice"),
        (request(tool_choice=1), "tool_choice"),
        (request(n=2), "n"),
        (request(n=0), "n"),
        (request(n=True), "n"),
        (request(n="1"), "n"),
    ],
)
def test_a_wrong_request_is_refused_by_field(
    body: bytes | dict[str, Any], param: str | None
) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.kind == "invalid_request_error"
    assert (param or "body") in caught.value.message
    assert len(caught.value.message) < 300


def test_deep_nesting_in_a_field_nobody_reads_is_served() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"x":' + DEEP + b"}"
    assert parse(body).raw == body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    "model messages tools tool_choice temperature top_p top_k max_tokens max_completion_tokens "
    "stop seed presence_penalty frequency_penalty logprobs top_logprobs n stream stream_options "
    "functions function_call user".split()
)
INNER = st.sampled_from(
    "role content type text image_url url tool_calls tool_call_id id function name arguments "
    "parameters description reasoning_content reasoning refusal include_usage".split()
)
WORDS = st.sampled_from(
    "system developer user assistant tool function text image_url refusal auto none".split()
)
NEAR = st.recursive(
    JSON | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(INNER, inner, max_size=5),
    max_leaves=16,
)


def _parses_or_is_refused(body: bytes) -> None:
    try:
        call = parse(body)
    except ProtocolError as exc:
        assert exc.status == 400
        orjson.loads(openai_chat.error(exc))
    else:
        assert call.raw == body
        assert call.messages


@given(JSON)
def test_any_json_parses_or_is_refused(value: Any) -> None:
    _parses_or_is_refused(_json(value))


@given(st.dictionaries(FIELDS, NEAR, max_size=8), st.lists(NEAR, max_size=3))
def test_anything_like_a_request_parses_or_is_refused(
    fields: dict[str, Any], messages: list[Any]
) -> None:
    _parses_or_is_refused(_json({"model": "m", "messages": messages, **fields}))


@given(st.binary(max_size=64))
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    _parses_or_is_refused(body)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()  # writes what orjson would not: NaN, large integers


def test_protocols_by_name() -> None:
    assert list(PROTOCOLS) == ["openai_chat"]
    assert get_protocol("openai_chat").NAME == "openai_chat"
    with pytest.raises(UnknownNameError, match="did you mean 'openai_chat'"):
        get_protocol("openai_chats")
