"""One rollout's sampled turns, put back as sampled into each new prompt.

A rollout may hold several conversations at once (sub-agents, retries, compaction); this class
tells them apart by what their messages say, never by order of arrival. Its invariants: the ids of
a turn that stands in a prompt unchanged are the sampled ones; a prompt is said to extend a call
only where that call's prompt and reply ids are its prefix, id by id; and where a conversation
continues a call without extending it, ``drift`` says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clawgym_env.calls import Message, Tool
from clawgym_env.rendering.drift import History, changed_since, reply_is_gone
from clawgym_env.rendering.ids import pack, unpack
from clawgym_env.rendering.marks import Marks
from clawgym_env.rendering.meaning import Meaning, meaning
from clawgym_env.rendering.splice import Cut, cut_at_turns, text_after_turn, without_stop

if TYPE_CHECKING:
    from clawgym_env.rendering.renderer import Renderer


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt for the policy.

    Attributes:
        ids: The prompt's token ids.
        parent_id: The recorded call whose prompt and reply are the longest prefix of ``ids``.
        extends: Whether there is such a call.
        spliced: How many turns stand in ``ids`` as they were sampled.
        drift: Why the conversation does not extend the call that it continued; None where it does,
            and where it continues none. A conversation may extend an early call and drift from a
            later one: then it branches at the early one.
    """

    ids: tuple[int, ...]
    parent_id: str | None
    extends: bool
    spliced: int
    drift: str | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """A sampled reply.

    Attributes:
        call_id: The call.
        sequence: Packed prompt and reply ids.
        prompt_bytes: How much of ``sequence`` is the prompt.
        stop: Text of the stop token that ends the reply; "" where none does.
        key: What the reply says.
        history: What the call was asked with; None where its prompt was not rendered here.
        spliced: How many turns stood in its prompt as sampled.
    """

    call_id: str
    sequence: bytes
    prompt_bytes: int
    stop: str
    key: Meaning
    history: History | None
    spliced: int

    @property
    def reply(self) -> bytes:
        return self.sequence[self.prompt_bytes :]

    def follows(self, prompt: bytes | bytearray) -> bool:
        """Whether the turn was sampled after exactly this prompt."""
        return len(prompt) == self.prompt_bytes and self.sequence.startswith(prompt)

    def prompt_goes_on(self, ids: bytes, place: int) -> bool:
        """Whether the turn's prompt has these ids at ``place``, in bytes."""
        return place + len(ids) <= self.prompt_bytes and self.sequence.startswith(ids, place)


@dataclass(frozen=True, slots=True)
class _Built:
    """A prompt's packed ids.

    Attributes:
        ids: The ids.
        last: The last turn put in, with the index of its message.
        exact: Whether that turn stands behind the very prompt that it was sampled after.
        spliced: How many turns were put in.
    """

    ids: bytes
    last: tuple[int, _Turn] | None
    exact: bool
    spliced: int


class Conversation:
    """The sampled turns of one rollout.

    Not safe between threads; a rollout's calls are rendered and recorded on one event loop.

    Args:
        renderer: Renders the model's format.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._turns: list[_Turn] = []
        self._by_key: dict[Meaning, list[_Turn]] = {}
        self._asked: dict[bytes, tuple[History, int]] = {}
        self._keys: dict[Meaning, Meaning] = {}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> RenderedPrompt:
        """The prompt for a call.

        Raises:
            RenderError: If the chat template refuses the conversation.
        """
        renderer, tools = self._renderer, tuple(tools)
        now = History(tuple(self._key(message) for message in messages), tools)
        known = {
            index: bool(key[2])
            for index, key in enumerate(now.keys)
            if key[0] == "assistant" and key in self._by_key
        }
        cut = cut_at_turns(renderer.chat, renderer.generation_prompt, messages, tools, known)
        built = self._build(cut, now)
        if cut.refused:
            built = self._build_without_slots(cut, messages, now) or built
        self._asked[_digest(built.ids)] = (now, built.spliced)
        parent = self._parent(built)
        return RenderedPrompt(
            ids=unpack(built.ids),
            parent_id=None if parent is None else parent.call_id,
            extends=parent is not None,
            spliced=built.spliced,
            drift=self._drift(now, built, cut),
        )

    def record(
        self, call_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int], message: Message
    ) -> None:
        """Remember a reply, so that later prompts hold it as it was sampled.

        Args:
            call_id: The call.
            prompt_ids: The prompt that the reply was sampled after, as ``render`` gave it.
            token_ids: The sampled ids, the stop token included where one was sampled.
            message: The reply as it goes to the harness.

        Raises:
            RenderError: If an id is not a non-negative int.
        """
        prompt, reply = pack(prompt_ids), pack(token_ids)
        history, spliced = self._asked.get(_digest(prompt), (None, 0))
        ends = len(token_ids) > 0 and token_ids[-1] in self._renderer.stop_ids
        turn = _Turn(
            call_id=call_id,
            sequence=prompt + reply,
            prompt_bytes=len(prompt),
            stop=self._renderer.tokenizer.token_text(token_ids[-1]) if ends else "",
            key=self._key(message),
            history=history,
            spliced=spliced,
        )
        self._turns.append(turn)
        self._by_key.setdefault(turn.key, []).append(turn)

    def _key(self, message: Message) -> Meaning:
        # One object a meaning: a rollout's requests repeat the same long texts over and over.
        key = meaning(message)
        return self._keys.setdefault(key, key)

    def _build(self, cut: Cut, now: History) -> _Built:
        """Put the sampled ids between the pieces."""
        ids = bytearray(
            self._renderer.tokenizer.encode_marked(cut.pieces[0], cut.marks, after=None)
        )
        last, exact = None, True
        for index, piece in zip(cut.turns, cut.pieces[1:], strict=True):
            # The calls that may have been continued: the ids that the last turn was sampled after
            # tell which of several earlier turns that say the same the conversation holds.
            targets = self._by_key[now.keys[cut.turns[-1]]] if index != cut.turns[-1] else []
            turn = self._best(self._by_key[now.keys[index]], ids, piece, cut.marks, targets)
            last, exact = (index, turn), turn.follows(ids)
            ids += turn.reply + self._after(turn, piece, cut.marks)
        return _Built(bytes(ids), last, exact, len(cut.turns))

    def _after(self, turn: _Turn, text: str, marks: Marks) -> bytes:
        """Packed ids of the text that the template has behind a turn."""
        text = without_stop(text, turn.stop)
        return self._renderer.tokenizer.encode_marked(text, marks, after=turn.stop)

    def _best(
        self,
        candidates: Sequence[_Turn],
        ids: bytearray,
        piece: str,
        marks: Marks,
        targets: Sequence[_Turn],
    ) -> _Turn:
        """Which of several turns that say the same stands between ``ids`` and ``piece``."""
        if len(candidates) == 1:
            return candidates[0]
        on_path = [turn for turn in targets if turn.sequence.startswith(ids)]
        if on_path:
            for turn in reversed(candidates):
                more = turn.reply + self._after(turn, piece, marks)
                if any(target.prompt_goes_on(more, len(ids)) for target in on_path):
                    return turn
        return next((turn for turn in reversed(candidates) if turn.follows(ids)), candidates[-1])

    def _build_without_slots(
        self, cut: Cut, messages: Sequence[Message], now: History
    ) -> _Built | None:
        """Go on from a recorded call where the template shows no slots but only adds text."""
        index = max(cut.refused)
        if not cut.refused[index].by_shape or index < max(cut.turns, default=-1):
            return None
        before = History(now.keys[:index], now.tools)
        turn = next(
            (turn for turn in self._by_key[now.keys[index]][::-1] if turn.history == before), None
        )
        if turn is None:
            return None
        stops = self._renderer.stop_texts
        found = text_after_turn(self._renderer.chat, messages, now.tools, index, stops)
        if found is None:
            return None
        ids = turn.sequence + self._after(turn, *found)
        return _Built(ids, (index, turn), True, turn.spliced + 1)

    def _parent(self, built: _Built) -> _Turn | None:
        """The call with the longest sequence that starts the ids; the last turn's among equals."""
        best = built.last[1] if built.last is not None and built.exact else None
        for turn in reversed(self._turns):
            longer = best is None or len(turn.sequence) > len(best.sequence)
            if longer and built.ids.startswith(turn.sequence):
                best = turn
        return best

    def _drift(self, now: History, built: _Built, cut: Cut) -> str | None:
        last = -1 if built.last is None else built.last[0]
        continued = [
            (len(turn.history.keys), turn)
            for turn in self._turns
            if turn.history is not None
            and len(turn.history.keys) > last
            and turn.history.is_start_of(now)
        ]
        if continued:
            place = max(size for size, _ in continued)
            same = [turn for size, turn in continued if size == place]
            replies = [turn.key for turn in same]
            return reply_is_gone(same[-1].call_id, replies, now, place, cut.refused)
        late = [index for index in cut.refused if index > last]
        if late:
            return cut.refused[min(late)].reason
        if built.last is not None and not built.exact:
            turn = built.last[1]
            return changed_since(turn.call_id, turn.history, now, last, cut.refused)
        return None


def _digest(ids: bytes) -> bytes:
    return hashlib.blake2b(ids, digest_size=16).digest()
