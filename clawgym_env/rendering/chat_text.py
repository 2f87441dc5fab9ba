"""A conversation as the template's text, with marks and with slots for sampled turns.

This module joins ``chat``, ``marks`` and ``template`` and knows nothing of ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clawgym_env.calls import Message, Tool
from clawgym_env.errors import RenderError
from clawgym_env.rendering.chat import message_dicts, tool_dicts
from clawgym_env.rendering.marks import Marks, Quoter, control_pattern
from clawgym_env.rendering.meaning import THINK_CLOSE, THINK_OPEN
from clawgym_env.rendering.parsing import CALL_CLOSE, CALL_OPEN
from clawgym_env.rendering.template import ChatTemplate

_LEADING_THINK = re.compile(rf"\s*(?:{THINK_OPEN}\s*(?:{THINK_CLOSE}\s*)?)?")


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Rendered text and the marks in it; see ``marks``."""

    text: str
    marks: Marks

    @property
    def plain(self) -> str:
        """The text without its marks."""
        return self.marks.remove(self.text)


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """What a template puts in front of a reply.

    Attributes:
        header: What also stands in front of the reply when it has become history.
        prefill: What follows the header only where the reply is still to come: an opened (or an
            empty) ``<think>``. It belongs to the turn that was sampled after it.
    """

    header: str
    prefill: str

    @classmethod
    def of(cls, text: str) -> GenerationPrompt:
        """The generation prompt's text in its two parts."""
        header, think, rest = text.partition(THINK_OPEN)
        return cls(header, think + rest)

    @property
    def text(self) -> str:
        """Header and prefill."""
        return self.header + self.prefill

    @property
    def in_reasoning(self) -> bool:
        """Whether a reply starts inside the reasoning."""
        return self.prefill.rfind(THINK_OPEN) > self.prefill.rfind(THINK_CLOSE)

    def before_turn(self, text: str) -> str | None:
        """The text before a turn of the history, as it was when the turn was sampled.

        Thinking tags that the template wrote in front of the turn go: the sampled ids bring their
        own. None where the text does not end in the header.
        """
        at = text.rfind(self.header) if self.header else len(text)
        if at < 0:
            return None
        end = at + len(self.header)
        return text[:end] + self.prefill if _LEADING_THINK.fullmatch(text[end:]) else None


class ChatText:
    """Renders conversations as marked text.

    Args:
        template: The chat template.
        tool_template: The template where tools are offered, if it is another.
        special: The tokenizer's special tokens.
        added: All its added tokens. Of the ones that are not special, those that the template
            writes or the parser reads are control tokens; others, such as runs of spaces, are
            ordinary text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tool_template: ChatTemplate | None,
        *,
        special: Iterable[str],
        added: Iterable[str],
    ) -> None:
        self._template = template
        self._tool_template = tool_template or template
        literal = template.literal_text + self._tool_template.literal_text
        literal += "\0".join(("", THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE))
        written = {token for token in added if token in literal and not token.isspace()}
        control = {*special, *written}
        self._pattern = control_pattern(control)
        # Most templates drop the messages of roles that they do not know without a word.
        self._developer = "developer" if "developer" in literal else "system"
        # Templates take the thinking out of an assistant's content by its tags.
        self._assistant_pattern = control_pattern(control - {THINK_OPEN, THINK_CLOSE})

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        slots: Mapping[int, bool] | None = None,
        marks: Marks | None = None,
    ) -> MarkedText:
        """The conversation's text.

        Args:
            messages: The conversation.
            tools: The tools offered.
            add_generation_prompt: Whether the text ends where a reply starts.
            slots: Indices of assistant messages to show as slots: slot ``2 * index`` is the
                content, and where the value is true slot ``2 * index + 1`` is the reasoning.
            marks: Marks of another rendering of these messages; chosen here by default.

        Raises:
            RenderError: If the template refuses the conversation.
        """
        for used in Marks.choices() if marks is None else (marks,):
            quote = Quoter(used, self._pattern)
            quote_assistant = Quoter(used, self._assistant_pattern)
            shown = message_dicts(
                messages,
                quote=quote,
                quote_assistant=quote_assistant,
                developer=self._developer,
            )
            offered = tool_dicts(tools, quote=quote)
            if not (quote.collided or quote_assistant.collided):
                break
        else:
            raise RenderError("the conversation holds every private-use character of plane 15")
        for index, with_reasoning in (slots or {}).items():
            shown[index] = {"role": "assistant", "content": used.slot_text(2 * index)}
            if with_reasoning:
                reasoning = used.slot_text(2 * index + 1)
                shown[index] |= {"reasoning_content": reasoning, "thinking": reasoning}
        template = self._tool_template if offered else self._template
        text = template.render(shown, offered, add_generation_prompt=add_generation_prompt)
        return MarkedText(used.unescape(text), used)

    def generation_prompt(self) -> GenerationPrompt:
        """What the template adds after a user message for a reply to start; "" where unknown."""
        asked = (Message("user", "Hello"),)
        try:
            without = self.render(asked, add_generation_prompt=False).text
            text = self.render(asked).text
        except RenderError:
            return GenerationPrompt("", "")
        return GenerationPrompt.of(text[len(without) :] if text.startswith(without) else "")
