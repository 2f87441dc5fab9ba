"""A model's Jinja chat template: dicts in, text out, as transformers renders it.

Templates come from model repositories and are untrusted: they run in Jinja's immutable sandbox.
This module knows nothing of tokens. Its invariant: the same input gives the same text, on any day
(see ``NOW``), and every failure is a RenderError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clawgym_env.errors import RenderError

NOW = datetime(2025, 1, 1, 12, 0)
"""What ``strftime_now`` tells by default.

Templates that print the date would otherwise render one conversation differently after midnight:
turns would drift in the middle of a rollout, and a seed would not reproduce an episode. Any fixed
day does; this one is plausible to models, as 1970 would not be.
"""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The Jinja text.
        origin: Where it came from, for messages.
        special_tokens: Names and texts that the template may use, such as ``eos_token``.
        variables: Further variables of the template, such as ``enable_thinking``.
        now: What ``strftime_now`` tells.

    Raises:
        RenderError: If the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str = "the chat template",
        special_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime = NOW,
    ) -> None:
        self.source = source
        self.origin = origin
        self._constants = {**(special_tokens or {}), **(variables or {})}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = now.strftime
        try:
            self._template = environment.from_string(source)
            self.literal_text = _literal_text(environment.parse(source))
        except (jinja2.TemplateError, SyntaxError, RecursionError) as exc:
            line = f"line {exc.lineno}: " if isinstance(exc, jinja2.TemplateSyntaxError) else ""
            raise RenderError(
                f"{origin} is not a valid Jinja template: {line}{exc}; "
                "correct it or copy the model's own again"
            ) from exc

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as text.

        Raises:
            RenderError: If the template refuses the conversation or fails on it.
        """
        try:
            return self._template.render(
                **{
                    "documents": None,
                    **self._constants,
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as exc:  # a template is foreign code and may raise anything
            raise RenderError(
                f"{self.origin} refused the conversation: {exc} "
                f"({type(exc).__name__}; roles: {_roles(messages)}); send what this template "
                "accepts or give the model directory another chat_template.jinja"
            ) from exc


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``, which marks assistant text: rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body)]

    @staticmethod
    def _body(caller: Any) -> Any:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _literal_text(tree: jinja2.nodes.Template) -> str:
    """All text that the template itself may write, pieces kept apart by NUL."""
    pieces = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    for const in tree.find_all(jinja2.nodes.Const):
        if isinstance(const.value, str):
            pieces.add(const.value)
    return "\0".join(sorted(pieces))


def _roles(messages: Sequence[Mapping[str, Any]], limit: int = 12) -> str:
    roles = [str(message.get("role")) for message in messages]
    more = len(roles) - limit
    return ", ".join(roles[:limit]) + (f" and {more} more" if more > 0 else "")
