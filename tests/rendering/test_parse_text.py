from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.calls import Message
from clawgym_env.rendering import parse_text


def call(arguments: str, name: str = '"bash"') -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    "text, content, reasoning, calls",
    [
        ("hello", "hello", None, []),
        ("", "", None, []),
        (" kept \n\n", " kept \n\n", None, []),
        (call("{}"), None, None, [("bash", "{}")]),
        ("I look.\n" + call('{"command": "ls"}'), "I look.", None, [("bash", '{"command": "ls"}')]),
        ("\n a \n\n" + call("{}"), "\n a", None, [("bash", "{}")]),
        (call('{"a":1 ,  "b":"x"}'), None, None, [("bash", '{"a":1 ,  "b":"x"}')]),
        (call("{}") + "\n" + call('{"b":2}'), None, None, [("bash", "{}"), ("bash", '{"b":2}')]),
        (
            call("{}") + call('[1, "x"]') + "tail",
            None,
            None,
            [("bash", "{}"), ("bash", '[1, "x"]')],
        ),
        (
            call('{"a": "<tool_call>}</tool_call>"}'),
            None,
            None,
            [("bash", '{"a": "<tool_call>}</tool_call>"}')],
        ),
        ('<tool_call>{"name": "finish"}</tool_call>', None, None, [("finish", "{}")]),
        (
            '<tool_call>{"arguments": {"a": 1}, "id": 3, "name": "f"}</tool_call>',
            None,
            None,
            [("f", '{"a": 1}')],
        ),
        ("<think>\nhm\n</think>\n\nhello", "hello", "hm", []),
        ("\n<think> hm </think>hello\n", "hello\n", " hm ", []),
        ("<think>\n\n</think>\n\nhello", "hello", None, []),
        ("<think>a</think>b\n" + call("{}"), "b", "a", [("bash", "{}")]),
        ("<think>a " + call("{}") + "</think>b", "b", "a " + call("{}"), []),
        ("say <think>x</think>", "say <think>x</think>", None, []),
    ],
)
def test_format(text: str, content: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    parsed = parse_text(text)
    assert parsed.error is None
    message = parsed.message
    assert (message.role, message.content, message.reasoning) == ("assistant", content, reasoning)
    assert [(c.name, c.arguments) for c in message.tool_calls] == calls


@pytest.mark.parametrize(
    "text, clause",
    [
        ('<tool_call>{"name": "f", "arguments": {}', "<tool_call> is not closed"),
        ("a <tool_call>", "<tool_call> is not closed"),
        (call('{"a": }'), "not valid JSON"),
        (call('{"a": NaN}'), "not valid JSON"),
        (call("{}}"), "not valid JSON"),
        (call("[" * 100_000), "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>[]</tool_call>", "not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        (call("{}", name='""'), "has no name"),
        (call("{}", name="7"), "has no name"),
        (call("{}", name='"\\ud800"'), "not printable"),
        (call("{}") + "<tool_call>{</tool_call>", "not valid JSON"),
        ("a</tool_call>", "</tool_call> without <tool_call>"),
        ("<think>and then", "<think> is not closed"),
    ],
)
def test_what_does_not_parse_is_plain_text(text: str, clause: str) -> None:
    parsed = parse_text(text)
    assert parsed.error is not None and clause in parsed.error
    assert parsed.message == Message("assistant", text)


def test_reasoning_is_kept_apart_where_only_the_call_is_broken() -> None:
    parsed = parse_text("<think>\nhm\n</think>\n\nx <tool_call>{")
    assert parsed.message == Message("assistant", "x <tool_call>{", reasoning="hm")
    assert parsed.error is not None


def test_reply_that_starts_inside_the_reasoning() -> None:
    parsed = parse_text("hm\n</think>\n\nhello", in_reasoning=True)
    assert parsed.message == Message("assistant", "hello", reasoning="hm")
    assert parse_text("hm", in_reasoning=True).error is not None


def test_ids_are_fresh_and_shaped_like_openais() -> None:
    ids = {c.id for c in parse_text(call("{}") * 20).message.tool_calls}
    assert len(ids) == 20
    assert all(i.startswith("call_") and len(i) == 29 for i in ids)


@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "{",
                "}",
                '"name":',
                '"a"',
                ",",
                '"arguments":',
                "<think>",
                "</think>",
                "\n",
                "x",
            ]
        )
    ).map("".join)
)
def test_nothing_raises_and_nothing_is_lost_without_calls(text: str) -> None:
    parsed = parse_text(text)
    if not parsed.message.tool_calls and parsed.message.reasoning is None:
        assert parsed.message.content is not None
        left = text.replace("<think>", "").replace("</think>", "").strip()
        kept = parsed.message.content.replace("<think>", "").replace("</think>", "").strip()
        assert kept == left


def test_parse_text_does_not_import_the_slow_library() -> None:
    program = (
        "import sys; from clawgym_env.rendering import parse_text; "
        f"assert parse_text({call('{}')!r}).message.tool_calls; "
        "assert 'renderers' not in sys.modules and 'openai' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
