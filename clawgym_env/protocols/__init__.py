"""The wire protocols that harnesses speak, one module each.

A protocol module turns a request body into a ``ModelCall`` and a ``Completion`` into reply bytes.
It knows nothing of HTTP servers, keys, tokenizers, policies or the store, does no input or output,
and keeps this invariant: whatever the body, ``parse`` returns a call or raises ``ProtocolError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from clawgym_env.calls import Completion, ModelCall
from clawgym_env.errors import ProtocolError, UnknownNameError
from clawgym_env.protocols import openai_chat

__all__ = ["PROTOCOLS", "WireProtocol", "get_protocol"]


class WireProtocol(Protocol):
    """What every protocol module offers; ``openai_chat`` documents each in full."""

    NAME: str

    def parse(
        self, body: bytes, *, rollout_id: str, call_id: str, index: int, arrived_at: float
    ) -> ModelCall:
        """The call in canonical form; raises ProtocolError."""

    def render(
        self,
        call: ModelCall,
        completion: Completion,
        *,
        prompt_tokens: int = 0,
        token_texts: Sequence[str] | None = None,
    ) -> bytes:
        """The body of a reply that is not streamed; raises PolicyError."""

    def stream(
        self,
        call: ModelCall,
        completion: Completion,
        *,
        prompt_tokens: int = 0,
        token_texts: Sequence[str] | None = None,
    ) -> Iterator[bytes]:
        """The events of a streamed reply, the last one included; raises PolicyError."""

    def error(self, exc: ProtocolError) -> bytes:
        """The body of an error reply."""

    def stream_error(self, exc: ProtocolError) -> bytes:
        """The event that tells of an error after a stream has begun."""

    def keepalive(self) -> bytes:
        """Bytes that keep a stream open and mean nothing."""

    def models(self, names: Sequence[str]) -> bytes:
        """The body of a list of models."""


PROTOCOLS: Mapping[str, WireProtocol] = MappingProxyType({openai_chat.NAME: openai_chat})
"""Every protocol by name."""


def get_protocol(name: str) -> WireProtocol:
    """The protocol of that name; raises UnknownNameError."""
    try:
        return PROTOCOLS[name]
    except KeyError:
        raise UnknownNameError("protocol", name, PROTOCOLS) from None
