from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_models import (
    BASH,
    CHATML,
    COUNTS,
    OPENS_THINKING,
    STRICT,
    STRIPS_THINKING,
    TRIMS,
    assistant,
    load,
    system,
    tool,
    user,
)
from rendering_play import Play, echo, spelled_out

from clawgym_env.calls import Message, TextPart, Tool, ToolCall
from clawgym_env.errors import RenderError
from clawgym_env.rendering import Renderer

AWKWARD = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</think>", "\U000f0000", "\U000f0002"]
TEXT = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([*AWKWARD, "\n", " a", "key", "ß"])), max_size=5
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
CALL = st.builds(
    ToolCall,
    st.just("sampled"),
    st.sampled_from(["bash", "unknown"]),
    st.dictionaries(TEXT, JSON, max_size=3).map(json.dumps),
)
REPLY = st.builds(
    Message,
    st.just("assistant"),
    st.none() | TEXT.filter(lambda text: not text.lstrip().startswith("<think>")),
    st.none() | TEXT.filter(lambda text: "</think>" not in text),
    st.lists(CALL, max_size=3).map(tuple),
)
SHIPPED = Path(__file__).parents[2] / "agents" / "models" / "chatml_tools.jinja"
FEW = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    templates = {
        "chatml": CHATML,
        "opens_thinking": OPENS_THINKING,
        "strips_thinking": STRIPS_THINKING,
        "trims": TRIMS,
        "strict": STRICT,
        "counts": COUNTS,
        "shipped": SHIPPED.read_text("utf-8"),
    }
    return {name: load(tmp_path_factory.mktemp(name), text) for name, text in templates.items()}


@pytest.fixture
def play(models: dict[str, Renderer]) -> Play:
    return Play(models["chatml"], [BASH])


@pytest.mark.parametrize("model", ["chatml", "opens_thinking", "strict", "shipped"])
@FEW
@given(data=st.data())
def test_any_conversation_extends_exactly(
    models: dict[str, Renderer], model: str, data: st.DataObject
) -> None:
    renderer = models[model]
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    play = Play(renderer, [BASH])
    messages = [system(data.draw(TEXT)), user(data.draw(TEXT))]
    previous: str | None = None
    for turn in range(data.draw(st.integers(1, 5))):
        prompt = play.ask(messages)
        assert (prompt.parent_id, prompt.drift, prompt.spliced) == (previous, None, turn)
        said = data.draw(REPLY)
        if renderer.generation_prompt.in_reasoning and not said.reasoning:
            said = replace(said, reasoning="so")
        ids = renderer.encode_reply(said)
        if rng.random() < 0.5:
            ids = spelled_out(renderer, ids, rng)
        if rng.random() < 0.2:
            ids = ids[: rng.randrange(len(ids) + 1)]
        previous, message = play.answer(prompt, ids)
        messages.append(echo(message, rng))
        messages += [tool(data.draw(TEXT)) for _ in message.tool_calls]
        if not message.tool_calls or rng.random() < 0.3:
            messages.append(user(data.draw(TEXT)))


@pytest.mark.parametrize("model", ["chatml", "shipped"])
@FEW
@given(data=st.data())
def test_spliced_prompt_reads_as_the_template_writes_it(
    models: dict[str, Renderer], model: str, data: st.DataObject
) -> None:
    renderer = models[model]
    play = Play(renderer, [BASH])
    messages = [user(data.draw(TEXT))]
    for _ in range(3):
        said = data.draw(REPLY)
        text = said.content.strip() if isinstance(said.content, str) else said.content
        thought = said.reasoning.strip() if said.reasoning else None
        _, _, message = play.call(messages, replace(said, content=text, reasoning=thought))
        messages += [message, tool(data.draw(TEXT))]
    ids = play.ask(messages).ids
    shown = renderer.chat.render(messages, [BASH])
    text = shown.plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert renderer.decode(ids) == text


def test_prompt_is_a_concatenation_of_what_was_sampled(play: Play) -> None:
    messages = [user()]
    first, _, said = play.call(messages, assistant("I look.", "ls"))
    reply = play.sequences["c0"][len(first.ids) :]
    messages += [said, tool("key.txt")]
    second = play.ask(messages)
    rest = play.renderer.encode("\n<|im_start|>tool\nkey.txt<|im_end|>\n<|im_start|>assistant\n")
    assert second.ids == first.ids + reply + rest
    assert second == replace(second, parent_id="c0", extends=True, spliced=1, drift=None)


def test_other_ids_of_the_same_text_are_kept_as_sampled(play: Play) -> None:
    canonical = play.renderer.encode_reply(assistant("the answer", "cat key.txt"))
    other = spelled_out(play.renderer, canonical, random.Random(1))
    assert other != canonical
    prompt, _, said = play.call([user()], other)
    following = play.ask([user(), said, tool()])
    assert following.ids[len(prompt.ids) :][: len(other)] == other
    assert following.parent_id == "c0" and following.drift is None


def test_reply_cut_by_length_keeps_the_templates_close(play: Play) -> None:
    whole = play.renderer.encode_reply(assistant("I will look at the file first."))
    prompt, _, said = play.call([user()], whole[:4])
    following = play.ask([user(), said, user("go on")])
    close = play.renderer.encode(
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )
    assert following.ids == prompt.ids + whole[:4] + close
    assert following.extends and following.drift is None


def test_text_after_the_calls_stays_in_the_ids(play: Play) -> None:
    text = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call> trailing words<|im_end|>'
    _, _, said = play.call([user()], text)
    assert said.text == ""
    following = play.ask([user(), said, tool()])
    assert "trailing words<|im_end|>\n<|im_start|>tool" in play.renderer.decode(following.ids)
    assert following.extends and following.drift is None


def test_reply_that_did_not_parse_comes_back_exactly(play: Play) -> None:
    _, _, said = play.call([user()], '<tool_call>\n{"name": "bash", \n</tool_call><|im_end|>')
    assert said.tool_calls == ()
    following = play.ask([user(), said, user("That is not JSON.")])
    assert following.extends and following.drift is None


def test_a_foreign_stop_token_stays(models: dict[str, Renderer]) -> None:
    play = Play(models["chatml"])
    ids = play.renderer.encode("words<|endoftext|>")
    prompt, _, said = play.call([user()], ids)
    following = play.ask([user(), said, user("more")])
    assert following.ids[: len(prompt.ids) + len(ids)] == prompt.ids + ids
    assert following.extends and following.drift is None


def test_altered_turn_is_a_branch(play: Play) -> None:
    messages = [system(), user()]
    _, _, said = play.call(messages, assistant("I look.", "ls"))
    altered = replace(said, content="I see.")
    branch = play.ask([*messages, altered, tool()])
    assert branch.drift == "message 2 (assistant) was rewritten by the harness since call c0"
    assert (branch.parent_id, branch.extends, branch.spliced) == (None, False, 0)
    assert branch.ids == play.renderer.render([*messages, altered, tool()], [BASH])

    _, _, next_said = play.call([*messages, altered, tool()], assistant("done"))
    on = play.ask([*messages, altered, tool(), next_said, user("thanks")])
    assert (on.parent_id, on.drift, on.spliced) == ("c1", None, 1)


@pytest.mark.parametrize(
    "arguments",
    ['{"command": "ls -la"}', '{"command": "ls", "x": 1}', "{}", '{"command": ["ls"]}', "ls"],
)
def test_altered_arguments_are_a_branch(play: Play, arguments: str) -> None:
    _, _, said = play.call([user()], assistant(None, "ls"))
    altered = replace(said, tool_calls=(replace(said.tool_calls[0], arguments=arguments),))
    assert play.ask([user(), altered, tool()]).drift is not None


def test_late_alteration_branches_at_the_last_exact_call(play: Play) -> None:
    messages = [user()]
    _, _, a = play.call(messages, assistant("one", "ls"))
    messages += [a, tool("x")]
    _, _, b = play.call(messages, assistant("two", "cat"))
    branch = play.ask([*messages, replace(b, content="2"), tool("y")])
    assert branch.parent_id == "c0" and branch.extends
    assert branch.drift == "message 3 (assistant) was rewritten by the harness since call c1"


def test_changed_context_before_a_kept_turn_is_drift(play: Play) -> None:
    messages = [system(), user()]
    _, _, a = play.call(messages, assistant("one", "ls"))
    messages += [a, tool("long output")]
    _, _, b = play.call(messages, assistant("two", "cat"))
    compacted = play.ask([system(), user(), a, tool("[elided]"), b, tool("z")])
    assert compacted.drift == "message 3 (tool) changed since call c1"
    assert (compacted.parent_id, compacted.spliced) == ("c0", 2)
    summary = play.ask([system(), user("Summary: …"), b, tool("z")])
    assert summary.drift == "message 1 (user) changed since call c1"
    assert (summary.parent_id, summary.extends, summary.spliced) == (None, False, 1)
    moved = play.ask([system(), b, tool("z")])
    assert moved.drift == "call c1 was asked with 4 messages, and its reply now follows 1"
    role = play.ask([system(), replace(user(), role="tool"), a])
    assert role.drift == "message 1 is tool where call c0 had user"


def test_changed_tools_are_drift(play: Play) -> None:
    _, _, said = play.call([user()], assistant("one", "ls"))
    play.tools = [BASH, Tool("finish")]
    assert play.ask([user(), said, tool()]).drift == "the tools changed since call c0"


def test_missing_reply_is_drift(play: Play) -> None:
    play.call([user()], assistant("one", "ls"))
    prompt = play.ask([user(), user("Are you there?")])
    assert prompt.drift == "the reply of call c0 is missing before message 1 (user)"
    assert prompt.parent_id is None


def test_unrelated_conversations_and_few_shot_turns_are_roots(play: Play) -> None:
    few_shot = [user("2+2"), assistant("4"), user("3+3")]
    first = play.ask(few_shot)
    assert (first.drift, first.parent_id, first.spliced) == (None, None, 0)
    play.answer(first, assistant("6"))
    other = play.ask([system("Make a title."), user("Find the key.")])
    assert (other.drift, other.parent_id) == (None, None)


def test_injected_turn_after_an_exact_one_is_no_drift(play: Play) -> None:
    _, _, a = play.call([user()], assistant("one", "ls"))
    prompt = play.ask([user(), a, tool(), assistant("Continuing."), user("Go on.")])
    assert (prompt.parent_id, prompt.drift, prompt.spliced) == ("c0", None, 1)


def test_parallel_conversations_do_not_mix(play: Play) -> None:
    rng = random.Random(0)
    threads = [[system(f"Agent {i}"), user()] for i in range(3)]
    last: list[str | None] = [None, None, None]
    for turn in range(4):
        prompts = [play.ask(messages) for messages in threads]
        for i in rng.sample(range(3), 3):
            assert (prompts[i].parent_id, prompts[i].drift) == (last[i], None)
            last[i], said = play.answer(prompts[i], assistant("same words", f"ls {turn}"))
            threads[i] += [echo(said, rng), tool(f"{turn}")]


def test_fork_from_one_turn_extends_it_twice(play: Play) -> None:
    _, _, a = play.call([user()], assistant("one", "ls"))
    for result in ("x", "y"):
        prompt, _, _ = play.call([user(), a, tool(result)], assistant("two"))
        assert (prompt.parent_id, prompt.drift) == ("c0", None)


def test_retries_with_equal_meaning_follow_the_ids_in_use(play: Play) -> None:
    renderer, rng = play.renderer, random.Random(3)
    canonical = renderer.encode_reply(assistant("the answer", "cat key.txt"))
    first_ask = play.ask([user()])
    variants = [canonical, *(spelled_out(renderer, canonical, rng) for _ in range(2))]
    assert len(set(variants)) == 3
    _, said = play.answer(first_ask, variants[0])
    play.answer(first_ask, variants[1])
    # The latest retry stands for the turn, and a conversation that went on with it keeps it …
    messages = [user(), said, tool("x")]
    prompt, call, more = play.call(messages, assistant("then", "ls"))
    assert prompt.parent_id == "c1" and prompt.drift is None
    # … even when yet another retry comes in between.
    play.answer(first_ask, variants[2])
    following = play.ask([*messages, more, tool("y")])
    assert (following.parent_id, following.drift, following.spliced) == (call, None, 2)


def test_retry_in_another_context_prefers_the_exact_prompt(play: Play) -> None:
    said_ids = {}
    for name in ("A", "B"):
        ids = play.renderer.encode_reply(assistant("ok", "ls"))
        said_ids[name] = spelled_out(play.renderer, ids, random.Random(name))
        _, _, said = play.call([system(name), user()], said_ids[name])
    for name, call in (("A", "c0"), ("B", "c1")):
        prompt = play.ask([system(name), user(), said, tool()])
        assert (prompt.parent_id, prompt.drift) == (call, None)


def test_dropped_thinking_is_a_branch_with_the_reason(models: dict[str, Renderer]) -> None:
    play = Play(models["strips_thinking"], [BASH])
    messages = [user()]
    _, _, a = play.call(messages, assistant(None, "ls", reasoning="Look first."))
    messages += [a, tool("x")]
    in_turn, _, b = play.call(messages, assistant("found", reasoning="Easy."))
    assert (in_turn.parent_id, in_turn.drift) == ("c0", None)
    messages += [b, user("thanks")]
    after, _, c = play.call(messages, assistant("bye", reasoning="Polite."))
    assert after.drift == "the template leaves out the reasoning of message 3 (assistant)"
    assert (after.parent_id, after.spliced) == (None, 0)
    assert after.ids == play.renderer.render(messages, [BASH])
    assert "Look first." not in play.renderer.decode(after.ids)
    assert play.ask([*messages, c, tool("z")]).parent_id == "c2"


def test_thinking_that_the_harness_dropped_is_named(play: Play) -> None:
    _, _, said = play.call([user()], assistant("hi", reasoning="Greet."))
    prompt = play.ask([user(), replace(said, reasoning=None), user("more")])
    assert prompt.drift == "message 1 (assistant) came back without its reasoning, call c0"


def test_thinking_that_came_back_inside_the_content_matches(play: Play) -> None:
    _, _, said = play.call([user()], assistant("hi", reasoning="Greet."))
    inline = replace(said, reasoning=None, content="<think>\nGreet.\n</think>\n\nhi")
    assert play.ask([user(), inline, user("more")]).parent_id == "c0"


def test_opened_thinking_belongs_to_the_turn(models: dict[str, Renderer]) -> None:
    play = Play(models["opens_thinking"])
    prompt, _, said = play.call([user()], "I greet.\n</think>\n\nhi<|im_end|>")
    assert (said.reasoning, said.content) == ("I greet.", "hi")
    following = play.ask([user(), said, user("more")])
    assert following.parent_id == "c0" and following.drift is None
    text = play.renderer.decode(following.ids)
    assert text.count("<think>\nI greet.\n</think>\n\nhi<|im_end|>\n<|im_start|>user") == 1


def test_trimming_template_extends(models: dict[str, Renderer]) -> None:
    play = Play(models["trims"])
    prompt, _, said = play.call([user("  hi \n")], "  spaced \n\n<|im_end|>")
    assert said.content == "  spaced \n\n"
    following = play.ask([user("  hi \n"), said, user("more")])
    assert (following.parent_id, following.drift) == ("c0", None)


def test_template_that_refuses_slots_extends_where_it_only_adds(
    models: dict[str, Renderer],
) -> None:
    play = Play(models["strict"], [BASH])
    messages = [user()]
    for turn in range(3):
        prompt, _, said = play.call(messages, assistant(f"t{turn}", "ls"))
        assert prompt.parent_id == (f"c{turn - 1}" if turn else None)
        assert (prompt.drift, prompt.spliced) == (None, turn)
        messages += [said, tool("x<|im_end|>")]


def test_template_that_refuses_slots_and_is_not_a_prefix_drifts(
    models: dict[str, Renderer],
) -> None:
    play = Play(models["counts"], [BASH])
    _, _, said = play.call([user()], assistant("look", "ls"))
    prompt = play.ask([user(), said, tool()])
    assert prompt.drift == "the template refuses a conversation with a placeholder in it"
    assert (prompt.parent_id, prompt.spliced) == (None, 0)
    assert prompt.ids == play.renderer.render([user(), said, tool()], [BASH])


def test_template_that_renders_earlier_turns_anew_drifts(models: dict[str, Renderer]) -> None:
    play = Play(models["counts"], [BASH])
    _, _, said = play.call([user()], assistant("look"))
    prompt = play.ask([user(), said, user("more")])
    assert prompt.drift == "the template rendered turns before call c0 anew"
    assert (prompt.parent_id, prompt.spliced) == (None, 1)


def test_template_error_is_raised_as_it_is(models: dict[str, Renderer]) -> None:
    play = Play(models["strict"])
    with pytest.raises(RenderError, match="unknown role wizard"):
        play.ask([Message("wizard", "hi")])
    _, _, said = play.call([user()], assistant("hi"))
    with pytest.raises(RenderError, match="unknown role wizard"):
        play.ask([user(), said, Message("wizard", "hi")])


def test_prompt_recorded_without_rendering_is_named(play: Play) -> None:
    ids = play.renderer.encode_reply(assistant("hi"))
    play.conversation.record("elsewhere", (1, 2, 3), ids, assistant("hi"))
    prompt = play.ask([user(), assistant("hi"), user("more")])
    assert prompt.drift == "the prompt of call elsewhere was not rendered by this conversation"


def test_content_parts_are_the_same_text(play: Play) -> None:
    _, _, said = play.call([user("ab")], assistant("hi"))
    parts = Message("user", (TextPart("a"), TextPart("b")))
    again = replace(said, content=(TextPart("hi"),))
    assert play.ask([parts, again, user("more")]).parent_id == "c0"
