from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rendering_models import (
    BASH,
    CHATML,
    STRICT,
    assistant,
    load,
    system,
    tokenizer_json,
    tool,
    user,
    write_model,
)
from tokenizers import Tokenizer

from clawgym_env.errors import RenderError
from clawgym_env.rendering import Renderer


def test_reads_what_transformers_saves(tmp_path: Path) -> None:
    renderer = load(tmp_path)
    assert renderer.stop_ids == (2,) and renderer.stop_texts == ("<|im_end|>",)
    assert renderer.vocab_size == Tokenizer.from_str(tokenizer_json()).get_vocab_size()
    assert renderer.decode(renderer.encode("<|im_start|>ü 🦀")) == "<|im_start|>ü 🦀"


def test_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    write_model(tmp_path, "configuration")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    renderer = Renderer.from_pretrained(str(tmp_path))
    assert renderer.decode(renderer.render([user("file")])) == "file!"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_model(tmp_path, chat_template=named)
    renderer = Renderer.from_pretrained(tmp_path)
    assert renderer.decode(renderer.render([user()])) == "plain"
    assert renderer.decode(renderer.render([user()], [BASH])) == "tools"


def test_end_tokens_from_every_place(tmp_path: Path) -> None:
    write_model(tmp_path, eos_token={"content": "<|im_end|>", "__type": "AddedToken"})
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert Renderer.from_pretrained(tmp_path).stop_ids == (2, 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    renderer = Renderer.from_pretrained(tmp_path)
    assert renderer.stop_ids == (2, 0) and renderer.stop_texts == ("<|im_end|>", "<|endoftext|>")
    write_model(tmp_path, eos_token=None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert Renderer.from_pretrained(tmp_path).stop_ids == (0,)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert Renderer.from_pretrained(tmp_path).stop_ids == (2,)


def test_tokens_declared_in_the_configuration_alone(tmp_path: Path) -> None:
    size = Tokenizer.from_str(tokenizer_json()).get_vocab_size()
    added: dict[str, dict[str, object]] = {
        "2": {"content": "<|im_end|>", "special": True},
        str(size): {"content": "<|more|>", "special": True, "normalized": False},
        str(size + 1): {"content": "<plain>", "special": False},
    }
    write_model(tmp_path, added_tokens_decoder=added)
    renderer = Renderer.from_pretrained(tmp_path)
    assert renderer.encode("<|more|><plain>") == (size, size + 1)
    assert renderer.vocab_size == size + 2
    added["9"] = {"content": "<|elsewhere|>", "special": True}
    write_model(tmp_path, added_tokens_decoder=added)
    with pytest.raises(RenderError, match="gives the token '<|elsewhere|>' the id 9"):
        Renderer.from_pretrained(tmp_path)
    write_model(tmp_path, added_tokens_decoder={"one": "<|more|>"})
    with pytest.raises(RenderError, match=r"added_tokens_decoder .* 'one'"):
        Renderer.from_pretrained(tmp_path)


def test_special_tokens_and_variables_reach_the_template(tmp_path: Path) -> None:
    write_model(tmp_path, "{{ bos_token }}{{ mood }}{{ strftime_now('%Y') }}")
    renderer = Renderer.from_pretrained(tmp_path, template_variables={"mood": "calm"})
    assert renderer.decode(renderer.render([user()])) == "<|endoftext|>calm2025"


def test_fingerprint_tells_formats_apart(tmp_path: Path) -> None:
    same = [load(tmp_path / name).fingerprint for name in ("a", "b")]
    assert same[0] == same[1] and len(same[0]) == 64
    others = [
        load(tmp_path / "c", STRICT).fingerprint,
        load(tmp_path / "d", tags_are_tokens=False).fingerprint,
        Renderer.from_pretrained(tmp_path / "a", template_variables={"x": 1}).fingerprint,
    ]
    assert len({same[0], *others}) == 4


def test_missing_and_malformed_files_name_file_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="nowhere is not a directory.*save_pretrained"):
        Renderer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(RenderError, match=r"tokenizer\.json is missing; save the tokenizer"):
        Renderer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RenderError, match=r"tokenizer\.json is not a tokenizer"):
        Renderer.from_pretrained(tmp_path)

    write_model(tmp_path, chat_template=None)
    with pytest.raises(RenderError, match=r"no chat template.*put .* into .*chat_template\.jinja"):
        Renderer.from_pretrained(tmp_path)
    write_model(tmp_path, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(RenderError, match="no chat template"):
        Renderer.from_pretrained(tmp_path)
    write_model(tmp_path, chat_template=[{"template": "x"}])
    with pytest.raises(RenderError, match="no chat template"):
        Renderer.from_pretrained(tmp_path)
    write_model(tmp_path, eos_token=None)
    with pytest.raises(RenderError, match="no token that ends a reply; set eos_token"):
        Renderer.from_pretrained(tmp_path)
    write_model(tmp_path, eos_token="</s>")
    with pytest.raises(RenderError, match="eos_token '</s>' .* is not a token"):
        Renderer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(RenderError, match=r"tokenizer_config\.json is not valid JSON"):
        Renderer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(RenderError, match="must hold a JSON object, got list"):
        Renderer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "template, clause",
    [
        ("a\n{% if %}", r"chat_template in .*tokenizer_config\.json is not a valid.*line 2"),
        ("{% generation %}{% continue %}{% endgeneration %}", "not a valid Jinja template"),
        ("{{ nothing | no_such_filter }}", "not a valid Jinja template"),
    ],
)
def test_invalid_template(tmp_path: Path, template: str, clause: str) -> None:
    write_model(tmp_path, template)
    with pytest.raises(RenderError, match=clause):
        Renderer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "template, clause",
    [
        ("{{ raise_exception('no thanks') }}", "refused the conversation: no thanks"),
        ("{{ messages[7].content + 'x' }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0] | tojson(indent=messages) }}", "roles: user"),
    ],
)
def test_template_that_fails_is_a_render_error(tmp_path: Path, template: str, clause: str) -> None:
    renderer = load(tmp_path, template)
    with pytest.raises(RenderError, match=clause):
        renderer.render([user()])


def test_conversation_without_messages(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="UndefinedError"):
        load(tmp_path).render([])


def test_importing_does_not_load_slow_libraries() -> None:
    program = (
        "import sys, clawgym_env.rendering; "
        "slow = {'renderers', 'openai', 'torch', 'transformers'}; "
        "assert not slow.intersection(sys.modules), slow.intersection(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_one_renderer_serves_many_conversations(tmp_path: Path) -> None:
    renderer = load(tmp_path, CHATML)
    messages = [system(), user(), assistant("x", "ls"), tool()]
    first = renderer.conversation().render(messages, [BASH])
    second = renderer.conversation().render(messages, [BASH])
    assert first == second and json.loads(json.dumps(first.ids)) == list(first.ids)
