"""Plays a harness and a policy against a Conversation, checking what must hold at every prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from clawgym_env.calls import Message, Tool, ToolCall
from clawgym_env.rendering import RenderedPrompt, Renderer
from clawgym_env.rendering.conversation import Conversation


@dataclass
class Play:
    """One rollout: calls are numbered c0, c1, …; ``sequences`` holds prompt and reply ids."""

    renderer: Renderer
    tools: Sequence[Tool] = ()
    sequences: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prompts: dict[str, RenderedPrompt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversation: Conversation = self.renderer.conversation()

    def ask(self, messages: Sequence[Message]) -> RenderedPrompt:
        prompt = self.conversation.render(messages, self.tools)
        fits = [c for c, ids in self.sequences.items() if prompt.ids[: len(ids)] == ids]
        assert prompt.extends == bool(fits) == (prompt.parent_id is not None)
        if fits:
            longest = max(len(self.sequences[call]) for call in fits)
            assert prompt.parent_id is not None
            assert len(self.sequences[prompt.parent_id]) == longest
        return prompt

    def answer(
        self, prompt: RenderedPrompt, reply: Message | Sequence[int] | str
    ) -> tuple[str, Message]:
        """Record a reply and give the call's id and the message as the harness gets it."""
        if isinstance(reply, Message):
            ids = self.renderer.encode_reply(reply)
        elif isinstance(reply, str):
            ids = self.renderer.encode(reply)
        else:
            ids = tuple(reply)
        call_id = f"c{len(self.sequences)}"
        message = self.renderer.parse(ids, self.tools).message
        self.conversation.record(call_id, prompt.ids, ids, message)
        self.sequences[call_id] = prompt.ids + ids
        self.prompts[call_id] = prompt
        return call_id, message

    def call(
        self, messages: Sequence[Message], reply: Message | Sequence[int] | str
    ) -> tuple[RenderedPrompt, str, Message]:
        prompt = self.ask(messages)
        call_id, message = self.answer(prompt, reply)
        return prompt, call_id, message


def echo(message: Message, rng: random.Random) -> Message:
    """The message as some harness might send it back: the same by meaning."""
    calls = []
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        if isinstance(arguments, dict) and rng.random() < 0.5:
            items = list(arguments.items())
            rng.shuffle(items)
            arguments = dict(items)
        text = json.dumps(
            arguments,
            indent=rng.choice([None, None, 2]),
            separators=rng.choice([None, (",", ":")]),
            ensure_ascii=rng.random() < 0.5,
        )
        calls.append(ToolCall(f"toolu_{rng.randrange(10**6)}", call.name, text))
    content = message.content
    if calls and not content:
        content = rng.choice([None, "", " "])
    elif isinstance(content, str) and rng.random() < 0.3:
        content = content.strip()
    return replace(message, content=content, tool_calls=tuple(calls))


def spelled_out(renderer: Renderer, ids: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """Other ids of the same text: some tokens spelled out in smaller ones."""
    out: list[int] = []
    control = {renderer.tokenizer.token_id(token) for token in renderer.tokenizer.added_tokens()}
    for index in ids:
        text = renderer.decode([index])
        if index in control or "\ufffd" in text or rng.random() < 0.5:
            out.append(index)
        else:
            out += [part for character in text for part in renderer.encode(character)]
    assert renderer.decode(out) == renderer.decode(ids)
    return tuple(out)
