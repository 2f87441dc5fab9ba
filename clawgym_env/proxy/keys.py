"""Which rollout a request belongs to: secret keys, held as digests only.

It knows nothing of HTTP beyond header names and nothing of what a key opens. Invariant: no object
of this module holds a key in clear, so none can reach a log, a repr or the store; a key is looked
up by its digest, so the time that takes says nothing of the keys that exist.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from clawgym_env.errors import ConfigError

T = TypeVar("T")

_KEY_HEADERS = (b"x-api-key", b"api-key", b"x-goog-api-key")
_REMEMBERED = 65_536
"""How many retired keys are told apart from unknown ones."""


class KeyRing(Generic[T]):
    """Maps secret keys to what they open."""

    def __init__(self) -> None:
        self._opens: dict[bytes, T] = {}
        self._retired: dict[bytes, None] = {}

    def add(self, value: T, key: str | None = None) -> str:
        """Make a key open a value.

        Args:
            value: What the key opens.
            key: The key; a fresh secret one where it is None.

        Returns:
            The key.

        Raises:
            ConfigError: The key given is taken, empty, or holds what a header or a path cannot.
        """
        if key is None:
            key = secrets.token_urlsafe(32)
        elif not key or not all("!" <= c <= "~" and c != "/" for c in key):
            raise ConfigError(
                "the key given is empty or holds a space, a slash or a character outside ASCII; "
                "give letters, digits, '-' and '_'"
            )
        digest = _digest(key)
        if digest in self._opens:
            raise ConfigError("the key given is in use by another session; give another one")
        self._retired.pop(digest, None)
        self._opens[digest] = value
        return key

    def find(self, key: str) -> T | None:
        """What the key opens, or None."""
        return self._opens.get(_digest(key))

    def is_retired(self, key: str) -> bool:
        """Whether the key opened something once; only the latest retired keys are remembered."""
        return _digest(key) in self._retired

    def retire(self, value: T) -> None:
        """Take back every key that opens this very value."""
        for digest in [d for d, held in self._opens.items() if held is value]:
            del self._opens[digest]
            self._retired[digest] = None
        while len(self._retired) > _REMEMBERED:
            del self._retired[next(iter(self._retired))]


def offered_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    """The keys in a request's headers, in the order in which they came.

    Args:
        headers: Names in lower case, and values, as ASGI gives them.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"authorization":
            scheme, _, token = text.partition(" ")
            if scheme.lower() == "bearer" and token.strip():
                yield token.strip()
        elif name in _KEY_HEADERS and text:
            yield text


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
