"""Tokenizers and models made on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_texts import texts
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agents.models.tiny import CONTROL_TOKENS, TAGS, make_tiny, train_tokenizer
from clawgym_env.calls import Message, Tool, ToolCall
from clawgym_env.errors import ConfigError, UnknownNameError
from clawgym_env.rendering import Renderer

TOKENIZER = train_tokenizer(texts(), 400)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(ids_of(text), skip_special_tokens=False) == text


@given(st.integers(0))
def test_a_number_is_a_token_a_digit(number: int) -> None:
    assert [TOKENIZER.decode([i]) for i in ids_of(f"x={number},")][-len(str(number)) - 1 : -1] == [
        *str(number)
    ]


@pytest.mark.parametrize("word", ["file", "bash", "unseen", "a-1"])
def test_a_word_has_the_same_ids_wherever_it_stands(word: str) -> None:
    alone = ids_of(word)
    for before, after in [(" ", " "), ('"', '"}}'), ("'", "'."), ("/", "\n"), ("=", "=")]:
        ids = ids_of(before + word + after)
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids)))


@pytest.mark.parametrize("token", [*CONTROL_TOKENS, *TAGS])
def test_control_tokens_and_tags_are_one_token_each(token: str) -> None:
    assert len(ids_of(token)) == 1


def test_the_vocabulary_is_no_larger_than_asked() -> None:
    assert len(TOKENIZER) <= 400
    assert len(train_tokenizer(["ab"], 5000)) < 300


def test_the_same_texts_give_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_tiny(texts(), tmp_path / name, size="200k", vocab_size=300, seed=3)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "chat_template.jinja" in files and "generation_config.json" in files
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_seed_sets_the_weights_and_torchs_own_state_stays(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    paths = [make_tiny(texts(), tmp_path / str(s), size="200k", seed=s) for s in (0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    weights = [(path / "model.safetensors").read_bytes() for path in paths]
    assert weights[0] != weights[1]


def test_transformers_loads_it(tmp_path: Path) -> None:
    path = make_tiny(texts(), tmp_path / "model", vocab_size=1024, context=2048)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert 700_000 < model.num_parameters() < 1_200_000
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 2048
    assert len(tokenizer) == model.config.vocab_size
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "find it"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert model(**prompt).logits.isfinite().all()


def test_the_renderer_reads_it_as_transformers_does(tiny_directory: Path) -> None:
    renderer = Renderer.from_pretrained(tiny_directory)
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    call = ToolCall("c1", "bash", '{"command": "ls"}')
    messages = (
        Message("system", "Be brief."),
        Message("user", "list the file"),
        Message("assistant", "so:", tool_calls=(call,)),
        Message("tool", "a.txt", tool_call_id="c1"),
    )
    tool = Tool("bash", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}})
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "list the file"},
        {
            "role": "assistant",
            "content": "so:",
            "tool_calls": [
                {"id": "c1", "function": {"name": call.name, "arguments": {"command": "ls"}}}
            ],
        },
        {"role": "tool", "content": "a.txt", "tool_call_id": "c1"},
    ]
    function = {"name": "bash", "description": "Run.", "parameters": tool.parameters}
    expected = tokenizer.apply_chat_template(
        plain,
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    assert list(renderer.render(messages, (tool,))) == expected
    parsed = renderer.parse(renderer.encode_reply(messages[2]), (tool,))
    assert parsed.error is None
    assert parsed.message.content == "so:"
    assert [(c.name, c.arguments) for c in parsed.message.tool_calls] == [
        (call.name, call.arguments)
    ]


def test_what_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown model size '1M'; did you mean '1m'"):
        make_tiny(texts(), tmp_path / "x", size="1M")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"vocab_size is 265 or more \(256 bytes and 9 control"):
        train_tokenizer(texts(), 264)
    with pytest.raises(ConfigError, match="none came"):
        train_tokenizer(["", ""], 400)
    (tmp_path / "mine").write_text("")
    for used in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ConfigError, match="exists and is not empty"):
            make_tiny(texts(), used)
