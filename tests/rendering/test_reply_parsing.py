"""Parsing sampled ids and encoding replies, with tags as tokens and as ordinary text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from rendering_models import BASH, CHATML, OPENS_THINKING, TRIMS, assistant, load
from test_conversation_splice import REPLY
from tokenizers import AddedToken, Tokenizer

from clawgym_env.calls import Message, Tool, ToolCall
from clawgym_env.errors import RenderError
from clawgym_env.rendering import Renderer, parse_text
from clawgym_env.rendering.meaning import meaning

FEW = settings(max_examples=40, deadline=None)

REPLIES = [
    "hello<|im_end|>",
    " kept \n<|im_end|>",
    "cut by leng",
    "",
    "<|im_end|>",
    'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command":"ls"}}\n</tool_call><|im_end|>',
    '<tool_call>{"name": "nope", "arguments": {}}</tool_call>\n'
    '<tool_call>{"name": "bash", "arguments": {"b": 2}}</tool_call> tail<|im_end|>',
    "<think>\nhm\n</think>\n\nhello<|im_end|>",
    '<think>hm</think>x<tool_call>{"name": "bash"}</tool_call><|im_end|>',
    "a <tool_call>{",
    '<tool_call>{"name": "bash", "arguments": {"a": }}</tool_call><|im_end|>',
    "<think>\nnot closed<|im_end|>",
    "a</tool_call><|im_end|>",
    "say <think>x</think><|im_end|>",
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def texty(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """A model whose tags are ordinary text, as SmolLM2's."""
    return load(tmp_path_factory.mktemp("texty"), tags_are_tokens=False)


@pytest.mark.parametrize("text", REPLIES)
def test_ids_and_text_parse_alike(renderer: Renderer, texty: Renderer, text: str) -> None:
    expected = parse_text(text.removesuffix("<|im_end|>"))
    for model in (renderer, texty):
        for parsed in (model.parse(model.encode(text)), model.parse_text(text)):
            assert meaning(parsed.message) == meaning(expected.message)
            assert parsed.error == expected.error
            assert parsed.message.content == expected.message.content
            assert [c.arguments for c in parsed.message.tool_calls] == [
                c.arguments for c in expected.message.tool_calls
            ]


def test_tags_spelled_in_ordinary_tokens_are_text(renderer: Renderer) -> None:
    said = assistant("see </tool_call>", "echo '<tool_call>' '</tool_call>' '<|im_end|>'")
    ids = renderer.encode_reply(said)
    parsed = renderer.parse(ids)
    assert parsed.error is None
    assert meaning(parsed.message) == meaning(said)
    assert ids.count(renderer.tokenizer.token_id("</tool_call>")) == 1


def test_control_tokens_that_were_sampled_stay_visible(renderer: Renderer) -> None:
    parsed = renderer.parse(renderer.encode("a<|im_start|>b<|im_end|>"))
    assert parsed.message.content == "a<|im_start|>b"


@FEW
@given(said=REPLY)
def test_encode_reply_parses_back(renderer: Renderer, said: Message) -> None:
    ids = renderer.encode_reply(said)
    assert ids[-1] in renderer.stop_ids
    assert not set(ids[:-1]).intersection(renderer.stop_ids)
    parsed = renderer.parse(ids)
    assert meaning(parsed.message) == meaning(said)


@FEW
@given(said=REPLY)
def test_encode_reply_is_what_the_template_adds(renderer: Renderer, said: Message) -> None:
    asked = Message("user", "Find the key.")
    whole = renderer.render([asked, said], add_generation_prompt=False)
    prompt, reply = renderer.render([asked]), renderer.encode_reply(said)
    text = renderer.decode(whole)
    assert text.startswith(renderer.decode(prompt) + renderer.decode(reply))
    assert text.removeprefix(renderer.decode(prompt + reply)) == "\n"


def test_encode_reply_with_text_tags(texty: Renderer) -> None:
    said = assistant("I look.", "ls", "cat key.txt", reasoning="hm")
    assert meaning(texty.parse(texty.encode_reply(said)).message) == meaning(said)
    with pytest.raises(RenderError, match="parses as"):
        texty.encode_reply(assistant('<tool_call>{"name": "bash"}</tool_call>'))


def test_encode_reply_where_the_prompt_opens_the_thinking(tmp_path: Path) -> None:
    model = load(tmp_path, OPENS_THINKING)
    said = assistant("hi", "ls", reasoning="Greet.")
    ids = model.encode_reply(said)
    assert model.decode(ids).startswith("Greet.\n</think>\n\nhi\n<tool_call>")
    assert meaning(model.parse(ids).message) == meaning(said)


def test_encode_reply_names_what_the_template_cannot_show(tmp_path: Path) -> None:
    no_tools = load(tmp_path / "a", CHATML.replace("message.tool_calls or []", "[]"))
    with pytest.raises(RenderError, match="chat template that shows tool calls"):
        no_tools.encode_reply(assistant("I look.", "ls"))
    no_prompt = load(tmp_path / "b", CHATML.replace("if add_generation_prompt", "if false"))
    with pytest.raises(RenderError, match="no ids of its own"):
        no_prompt.encode_reply(assistant("hi"))
    no_stop = load(tmp_path / "c", TRIMS.replace("{{- '<|im_end|>' }}", "{{- '<|endoftext|>' }}"))
    with pytest.raises(RenderError, match="none of the stop tokens"):
        no_stop.encode_reply(assistant("hi"))


def with_tags(directory: Path, template: str, tags: list[str]) -> Renderer:
    load(directory, template)
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.save(str(file))
    return Renderer.from_pretrained(directory)


HERMES_CALL = CHATML[
    CHATML.index("{{- '<tool_call>\\n") : CHATML.index("{%- endfor -%}\n{{- '<|im_end|>")
]
XML_CALL = """\
{{- '<tool_call>\\n<function=' + call.name + '>\\n' -}}
{%- for key, value in call.arguments.items() -%}
{{- '<parameter=' + key + '>\\n' -}}
{{- value if value is string else value | tojson -}}
{{- '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
"""
KEY_VALUE_CALL = """\
{{- '<tool_call>' + call.name + '\\n' -}}
{%- for key, value in call.arguments.items() -%}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
{{- value if value is string else value | tojson -}}
{{- '</arg_value>\\n' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
"""
WRITE = Tool("write", "", {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}})


@pytest.mark.parametrize(
    "form, tags",
    [(XML_CALL, []), (KEY_VALUE_CALL, ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])],
    ids=["xml", "key_value"],
)
def test_other_formats(tmp_path: Path, form: str, tags: list[str]) -> None:
    assert HERMES_CALL in CHATML
    model = with_tags(tmp_path, CHATML.replace(HERMES_CALL, form), tags)
    arguments = {"text": "two\nlines", "n": 3, "list": [1, "a"]}
    calls = (
        ToolCall("1", "write", json.dumps(arguments)),
        ToolCall("2", "bash", '{"command": "ls"}'),
    )
    said = Message("assistant", "I write.", reasoning="hm", tool_calls=calls)
    ids = model.encode_reply(said)
    assert meaning(model.parse(ids).message) == meaning(said)
    assert meaning(model.parse_text(model.decode(ids)).message) == meaning(said)

    number = Message("assistant", None, tool_calls=(ToolCall("1", "write", '{"text": 7}'),))
    parsed = model.parse(model.encode_reply(number), [WRITE, BASH])
    assert parsed.message.tool_calls[0].arguments == '{"text": "7"}'

    cut = model.parse(model.encode_reply(said)[:-4])
    assert cut.error == "<tool_call> is not closed by </tool_call>"
    assert cut.message.tool_calls == () and cut.message.reasoning == "hm"
    broken = model.parse(model.encode("<tool_call></tool_call>"))
    assert broken.error is not None and "not of the model's format" in broken.error
