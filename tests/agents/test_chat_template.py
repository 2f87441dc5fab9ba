"""The ChatML template with tools, as Transformers and as plain Jinja render it."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from agents.models.tiny import TEMPLATE

SOURCE = TEMPLATE.read_text(encoding="utf-8")
TOOL = {"name": "bash", "description": "Run <x> & 'é'.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]

TEXT = st.text(max_size=8)
CALL = st.builds(
    lambda name, arguments: {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    TEXT,
    st.one_of(st.just('{"a": 1}'), st.just(""), st.dictionaries(TEXT, TEXT, max_size=2)),
)
CONTENT = st.one_of(
    TEXT, st.none(), st.lists(st.builds(lambda t: {"type": "text", "text": t}, TEXT))
)
MESSAGE = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "developer", "user", "tool"]),
        CONTENT,
    ),
    st.builds(
        lambda content, calls, thinking: {
            "role": "assistant",
            "content": content,
            "tool_calls": calls,
            "reasoning_content": thinking,
        },
        CONTENT,
        st.one_of(st.none(), st.lists(CALL, max_size=2)),
        st.one_of(st.none(), TEXT),
    ),
)


def rendered(messages: list[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=SOURCE, add_generation_prompt=prompt
    )
    return str(texts[0])


@given(st.lists(MESSAGE, min_size=2, max_size=6), st.booleans())
def test_a_conversation_is_a_prefix_of_its_continuations(
    messages: list[dict[str, Any]], with_tools: bool
) -> None:
    tools = TOOLS if with_tools else None
    versions = [rendered(messages[: n + 1], tools) for n in range(len(messages))]
    for shorter, longer in zip(versions, versions[1:], strict=False):
        assert longer.startswith(shorter)
        assert len(longer) > len(shorter)
    assert rendered(messages, tools, prompt=True) == versions[-1] + "<|im_start|>assistant\n"


@given(st.lists(MESSAGE, max_size=4), st.booleans())
def test_it_needs_none_of_transformers_whitespace_settings(
    messages: list[dict[str, Any]], with_tools: bool
) -> None:
    tools = TOOLS if with_tools else None
    plain = jinja2.Environment(keep_trailing_newline=True)
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = plain.from_string(SOURCE)
    assert template.render(messages=messages, tools=tools) == rendered(messages, tools)


def test_how_it_looks() -> None:
    call = {"function": {"name": "bash", "arguments": '{"command":"ls"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a.txt\n"},
        {"role": "assistant", "reasoning_content": "hm", "content": "It is a.txt."},
    ]
    assert rendered(messages, TOOLS) == (
        "<|im_start|>system\nBe brief.\n\nTools:\n<tools>\n"
        + json.dumps(TOOL, ensure_ascii=False)
        + "\n</tools>\nCall a tool like this:\n<tool_call>\n"
        '{"name": "NAME", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nLook.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "bash", "arguments": {"command":"ls"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>tool\na.txt\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nIt is a.txt.<|im_end|>\n"
    )


def test_what_it_refuses() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(jinja2.TemplateError, match="reads text alone; got .* type 'image_url'"):
        rendered([{"role": "user", "content": [image]}])
    with pytest.raises(jinja2.TemplateError, match="role is system, .* got 'function'"):
        rendered([{"role": "function", "content": ""}])
