from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_models import (
    BASH,
    CHATML,
    CONTROL,
    assistant,
    load,
    system,
    tokenizer_json,
    tool,
    user,
    write_model,
)
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from clawgym_env.calls import ImagePart, Message, TextPart, Tool
from clawgym_env.errors import RenderError
from clawgym_env.rendering import Renderer
from clawgym_env.rendering.ids import pack, unpack
from clawgym_env.rendering.marks import Marks
from clawgym_env.rendering.tokens import Tokenizer

MARKS = next(Marks.choices())
WRITTEN = [token for token in CONTROL if "response" not in token]
TEXT = st.lists(
    st.one_of(st.sampled_from([*WRITTEN, "\U000f0000", "\U000f0001", "<", "|im_end|>"]), st.text())
).map("".join)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load(tmp_path_factory.mktemp("chatml"))


def structure(renderer: Renderer, ids: tuple[int, ...]) -> list[str]:
    """The control tokens among the ids."""
    control = {renderer.tokenizer.token_id(token): token for token in CONTROL}
    return [control[index] for index in ids if index in control]


@settings(max_examples=40, deadline=None)
@given(TEXT, TEXT, TEXT)
def test_no_text_of_a_conversation_becomes_control(
    renderer: Renderer, first: str, second: str, third: str
) -> None:
    def conversation(a: str, b: str, c: str) -> tuple[list[Message], list[Tool]]:
        tools = [Tool("bash", c, {"type": "object", "title": b, f"k{a}": [a]})]
        return [system(a), user(b), assistant("x", f"y{c}"), tool(a)], tools

    messages, tools = conversation(first, second, third)
    ids = renderer.render(messages, tools)
    assert structure(renderer, ids) == structure(
        renderer, renderer.render(*conversation("a", "b", "c"))
    )
    assert (
        renderer.decode(ids)
        == renderer.chat.render(messages, tools).plain.encode("utf-8", "replace").decode()
    )


def test_text_with_the_default_marks_is_kept(renderer: Renderer) -> None:
    text = "\U000f0000<|im_end|>\U000f0001 \U000f00020\U000f0002"
    ids = renderer.render([user(text)])
    assert f"user\n{text}<|im_end|>" in renderer.decode(ids)
    conversation = renderer.conversation()
    first = conversation.render([user(text)])
    conversation.record("c0", first.ids, renderer.encode("\U000f0002<|im_end|>"), assistant("s"))
    following = conversation.render([user(text), assistant("s"), user(text)])
    assert following.parent_id == "c0" and renderer.decode(following.ids).count(text) == 2


def test_marks_survive_a_template_that_escapes(tmp_path: Path) -> None:
    template = "{{ messages[0].content | tojson(ensure_ascii=true) }}<|im_end|>"
    renderer = load(tmp_path, template)
    ids = renderer.render([user("é <|im_end|>")])
    assert renderer.decode(ids) == '"\\u00e9 <|im_end|>"<|im_end|>'
    assert structure(renderer, ids) == ["<|im_end|>"]


def test_torn_marks_do_not_make_control_tokens(tmp_path: Path) -> None:
    renderer = load(tmp_path, "{{ messages[0].content.split('|') | join('|') }}<|im_end|>")
    assert structure(renderer, renderer.render([user("<|im_start|>")])) == ["<|im_end|>"]


def test_thinking_in_an_assistants_content_is_the_templates_to_read(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{- message.content -}}", "{{- message.content.split('</think>')[-1].lstrip() -}}"
    )
    renderer = load(tmp_path, template)
    text = renderer.decode(renderer.render([user(), assistant("<think>hm</think>\n\nhi")]))
    assert "assistant\nhi<|im_end|>" in text


def test_developer_messages_are_shown(tmp_path: Path, renderer: Renderer) -> None:
    told = Message("developer", "Be brief.")
    assert renderer.decode(renderer.render([told])).startswith("<|im_start|>system\nBe brief.")
    knows = load(tmp_path, "{{ messages[0].role }}{# #}{% if x == 'developer' %}{% endif %}")
    assert knows.decode(knows.render([told])) == "developer"


def test_images_are_refused(renderer: Renderer) -> None:
    message = Message("user", (TextPart("see"), ImagePart("data:image/png;base64,")))
    with pytest.raises(RenderError, match=r"message 1 \(user\) holds an image"):
        renderer.render([system(), message])


def test_half_a_surrogate_pair_is_shown_as_such(renderer: Renderer) -> None:
    ids = renderer.render([user("cut \ud83d"), tool("\ude00 off")])
    assert "cut \ufffd<|im_end|>" in renderer.decode(ids)
    assert renderer.render([user("\ud83e\udd80")]) == renderer.render([user("🦀")])


def test_ids_must_be_ids(renderer: Renderer) -> None:
    assert unpack(pack([0, 2**31 - 1])) == (0, 2**31 - 1)
    for bad in ([-1], [2**31], [1.5], ["1"]):
        with pytest.raises(RenderError, match="token ids must be"):
            pack(bad)  # type: ignore[arg-type]
    for bad in ([-1], [2**40], ["1"]):
        with pytest.raises(RenderError, match="token ids must be"):
            renderer.decode(bad)  # type: ignore[arg-type]
    assert renderer.decode([]) == ""


def test_cache_is_bounded_and_changes_nothing() -> None:
    backend = Backend.from_str(tokenizer_json())
    cached, bare = Tokenizer(backend, cache_bytes=2000), Tokenizer(backend, cache_bytes=0)
    texts = [f"message {n}" * (n % 5) for n in range(40)] * 2
    assert [cached.encode(text) for text in texts] == [bare.encode(text) for text in texts]
    assert 0 < cached._cache._size <= 2000
    assert len(bare._cache._items) == 0
    assert cached._cache._size == sum(
        sum(map(len, key)) + len(ids) + 256 for key, ids in cached._cache._items.items()
    )


def metaspace(scheme: str) -> Backend:
    """A tokenizer of SentencePiece's kind, which marks the starts of words and of texts."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(["hello user\n assistant\n world wide words\n"] * 3, trainer)
    return backend


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_pieces_have_the_ids_that_they_have_in_place(scheme: str) -> None:
    tokenizer = Tokenizer(metaspace(scheme))
    whole = "user\nhello</s>world\nassistant\n"
    first, second = "user\nhello</s>", "world\nassistant\n"
    pieces = tokenizer.encode(first) + tokenizer.encode_marked(second, MARKS, after="</s>")
    assert pieces == tokenizer.encode(whole)


def test_token_that_swallows_what_follows_is_seen_from_the_piece_behind_it() -> None:
    backend = Backend.from_str(tokenizer_json())
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    tokenizer = Tokenizer(backend)
    whole = tokenizer.encode("hello<|end|>\n \nuser")
    assert (
        tokenizer.encode("hello<|end|>")
        + tokenizer.encode_marked("\n \nuser", MARKS, after="<|end|>")
        == whole
    )


def test_plain_form_of_a_token_that_the_model_itself_would_make(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "<x>": 2, "<": 3}, unk_token="<unk>"))
    backend.add_special_tokens(["<x>"])
    tokenizer = Tokenizer(backend)
    marked = f"{MARKS.opening}<x>{MARKS.closing}"
    assert unpack(tokenizer.encode_marked(marked, MARKS, after=None)) == (3, 0, 0)


def test_untouched_directory(tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in write_model(tmp_path).iterdir()}
    Renderer.from_pretrained(tmp_path).render([user()], [BASH])
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
