"""All of one model's text format: prompts to ids, replies to messages, messages to replies.

Joins the other modules of this package for a model directory. It knows nothing of rollouts (see
``conversation``), HTTP or policies, and holds no state but caches, so one renderer serves all
rollouts of a process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from clawgym_env.calls import Message, Tool
from clawgym_env.errors import RenderError
from clawgym_env.rendering.chat_text import ChatText
from clawgym_env.rendering.conversation import Conversation
from clawgym_env.rendering.ids import unpack
from clawgym_env.rendering.loading import ModelFiles, load_model_files
from clawgym_env.rendering.meaning import meaning
from clawgym_env.rendering.parsing import ParsedReply
from clawgym_env.rendering.replies import ReplyParser, tool_format
from clawgym_env.rendering.template import NOW, ChatTemplate
from clawgym_env.rendering.tokens import CACHE_BYTES, Tokenizer


class Renderer:
    """One model's text format.

    Args:
        files: What the model directory says.
        template_variables: Further variables for the chat template, such as
            ``{"enable_thinking": False}``.
        now: The time that templates are told; fixed, so that a conversation renders alike on any
            day (see ``template.NOW``).
        cache_bytes: Bound of the cache of encoded text.

    Attributes:
        tokenizer: Text to ids and back.
        chat: Conversations to text.
        generation_prompt: What the template puts in front of a reply.
        vocab_size: Number of token ids, added tokens included.
        stop_ids: Ids that end a reply.
        stop_texts: Their texts.
        fingerprint: Hexadecimal hash of the tokenizer, template and variables; equal for renderers
            that give equal ids.

    Raises:
        RenderError: If the template is not valid Jinja.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        template_variables: Mapping[str, Any] | None = None,
        now: datetime = NOW,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        def compiled(source: str) -> ChatTemplate:
            return ChatTemplate(
                source,
                origin=files.template_origin,
                special_tokens=files.special_tokens,
                variables=template_variables,
                now=now,
            )

        template = compiled(files.template)
        tool_template = None if files.tool_template is None else compiled(files.tool_template)
        self.tokenizer = Tokenizer(files.tokenizer, cache_bytes=cache_bytes)
        self.chat = ChatText(
            template,
            tool_template,
            special=self.tokenizer.special_tokens(),
            added=self.tokenizer.added_tokens(),
        )
        self.generation_prompt = self.chat.generation_prompt()
        self.vocab_size = self.tokenizer.vocab_size
        self.stop_ids = files.stop_ids
        self.stop_texts = tuple(self.tokenizer.token_text(index) for index in files.stop_ids)
        variables = json.dumps([dict(template_variables or {}), now.isoformat()], sort_keys=True)
        self.fingerprint = hashlib.sha256((files.fingerprint + variables).encode()).hexdigest()
        self._parser = ReplyParser(
            self.tokenizer,
            tool_format(files.template + (files.tool_template or "")),
            in_reasoning=self.generation_prompt.in_reasoning,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        template_variables: Mapping[str, Any] | None = None,
        now: datetime = NOW,
    ) -> Renderer:
        """Read a local model or tokenizer directory, as transformers saves it.

        Args:
            path: The directory. Needs ``tokenizer.json`` and a chat template.
            template_variables: As for the class.
            now: As for the class.

        Raises:
            RenderError: If something is missing or malformed; names the file and the remedy.
        """
        files = load_model_files(Path(path))
        return cls(files, template_variables=template_variables, now=now)

    def conversation(self) -> Conversation:
        """A new rollout's conversations; see ``Conversation``."""
        return Conversation(self)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text in the model's native format: control tokens in it are control tokens."""
        return self.tokenizer.encode_ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, control tokens included.

        Raises:
            RenderError: If an id is negative or not an int.
        """
        return self.tokenizer.decode(ids)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """The conversation's ids as the chat template has them, nothing spliced in.

        Raises:
            RenderError: If the template refuses the conversation.
        """
        shown = self.chat.render(messages, tools, add_generation_prompt=add_generation_prompt)
        return unpack(self.tokenizer.encode_marked(shown.text, shown.marks, after=None))

    def encode_reply(self, message: Message) -> tuple[int, ...]:
        """Ids that a model would have sampled for this message.

        They start behind the generation prompt and end with the stop token that the template
        writes. ``parse`` of them gives a message that means the same.

        Raises:
            RenderError: If the template cannot show the message so that it parses back.
        """
        asked = Message("user", "Hello")
        prompt = self.chat.render((asked,)).text
        shown = self.chat.render((asked, message), add_generation_prompt=False)
        start = len(prompt) if shown.text.startswith(prompt) else -1
        header = self.generation_prompt.text
        if start < 0 and header in shown.text:
            # What comes before the reply changed with it; its header still stands right before it.
            start = shown.text.rindex(header) + len(header)
        if start < 0 or not header:
            raise RenderError(
                "the chat template does not show a reply behind its generation prompt, so a "
                "message has no ids of its own; answer with token ids or text instead"
            )
        ids = unpack(self.tokenizer.encode_marked(shown.text[start:], shown.marks))
        stop = next((place for place, index in enumerate(ids) if index in self.stop_ids), None)
        if stop is None:
            raise RenderError(
                f"the chat template writes none of the stop tokens {self.stop_texts} behind a "
                "reply; correct eos_token or the template"
            )
        reply = ids[: stop + 1]
        parsed = self.parse(reply)
        if meaning(parsed.message) != meaning(message):
            raise RenderError(
                f"the chat template shows the message as {self.decode(reply)!r}, which parses as "
                f"{parsed.message}, not as {message}; give the model directory a chat template "
                "that shows tool calls and reasoning"
            )
        return reply

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedReply:
        """The message that sampled ids say.

        Args:
            token_ids: The reply, with or without its stop token.
            tools: The tools offered; some formats take the arguments' types from them. Calls of
                unknown tools are delivered all the same.

        Raises:
            RenderError: If an id is negative or not an int.
        """
        ids = tuple(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        return self._parser.parse(ids, tools)

    def parse_text(self, text: str, tools: Sequence[Tool] = ()) -> ParsedReply:
        """The message that a reply in the model's native text format says; see ``parse``."""
        for stop in self.stop_texts:
            if text.endswith(stop):
                text = text[: -len(stop)]
                break
        return self._parser.parse_text(text, tools)
