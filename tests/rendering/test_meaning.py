from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering_models import assistant, tool, user

from clawgym_env.calls import ImagePart, Message, TextPart, ToolCall
from clawgym_env.rendering.meaning import arguments_key, meaning, parse_json


def called(arguments: str, name: str = "f", call_id: str = "x") -> Message:
    return Message("assistant", None, tool_calls=(ToolCall(call_id, name, arguments),))


@pytest.mark.parametrize(
    "one, other",
    [
        (assistant("a"), assistant(" a\n")),
        (assistant(None, "ls"), assistant("", "ls")),
        (assistant("a"), Message("assistant", (TextPart("a"),))),
        (assistant("a", reasoning="b\n"), assistant("a", reasoning="b")),
        (assistant("a", reasoning="b"), assistant("<think>b</think>a")),
        (assistant("a", reasoning=""), assistant("a")),
        (called('{"a":1,"b":[1.5]}'), called('{ "b": [1.5], "a": 1.0 }', call_id="y")),
        (called(""), called("{}")),
        (called("1e3"), called("1000")),
        (called('{"a": "\\u00e9"}'), called('{"a": "é"}')),
        (called("not json "), called("not json")),
        (tool("a"), replace(tool("a"), tool_call_id="other")),
        (user("ab"), Message("user", (TextPart("a"), TextPart("b")))),
    ],
)
def test_equal(one: Message, other: Message) -> None:
    assert meaning(one) == meaning(other)
    assert hash(meaning(one)) == hash(meaning(other))


@pytest.mark.parametrize(
    "one, other",
    [
        (assistant("a"), assistant("b")),
        (assistant("a b"), assistant("a  b")),
        (assistant("a"), assistant("a", reasoning="b")),
        (assistant("a"), assistant("a", "ls")),
        (assistant("", "a", "b"), assistant("", "b", "a")),
        (called("{}"), called("{}", name="g")),
        (called('{"a": true}'), called('{"a": 1}')),
        (called('{"a": "1"}'), called('{"a": 1}')),
        (called('{"a": null}'), called("{}")),
        (called('{"a": [1, 2]}'), called('{"a": [2, 1]}')),
        (called(str(2**63)), called(str(2**63 + 1))),
        (user("a"), user("a ")),
        (user("a"), Message("system", "a")),
        (user("a"), Message("user", (TextPart("a"), ImagePart("data:")))),
    ],
)
def test_different(one: Message, other: Message) -> None:
    assert meaning(one) != meaning(other)


@pytest.mark.parametrize("text", ["{", "NaN", '{"a": -Infinity}', "[" * 100_000, "1" * 5000, ""])
def test_what_is_not_sane_json_stands_for_itself(text: str) -> None:
    assert parse_json(text) is None
    assert arguments_key(text) == (f"text:{text}" if text else "{}")


@given(st.text())
def test_any_text_has_a_key(text: str) -> None:
    assert arguments_key(text) == arguments_key(f" {text}\n")
