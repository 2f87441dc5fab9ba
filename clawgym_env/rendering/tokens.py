"""Text to token ids and back, by a Hugging Face ``tokenizer.json``.

This module knows nothing of messages or templates. Its invariant: pieces of a text that are
encoded apart give the ids that they have in place, so a prompt can be put together from pieces.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import tokenizers

from clawgym_env.errors import RenderError
from clawgym_env.rendering.ids import pack, unpack
from clawgym_env.rendering.marks import Marks

CACHE_BYTES = 64 * 2**20
"""Default bound of the cache of encoded pieces: its texts and ids together, in bytes."""


class Tokenizer:
    """A tokenizer with a bounded cache of the pieces that prompts are made of.

    Args:
        backend: The tokenizer; truncation and padding are switched off.
        cache_bytes: Bound of the cache; 0 for none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, cache_bytes: int = CACHE_BYTES) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._cache = _Cache(cache_bytes)
        self._added = {
            token.content: (index, token.special)
            for index, token in backend.get_added_tokens_decoder().items()
        }
        # Some tokenizers put a space before whatever starts a text; a piece is not a start.
        self._marks_starts = self._raw("\na") != self._raw("\n") + self._raw("a")

    @functools.cached_property
    def vocab_size(self) -> int:
        """The highest id plus one, added tokens included."""
        added = max((index for index, _ in self._added.values()), default=-1)
        return max(int(self._backend.get_vocab_size(with_added_tokens=True)), added + 1)

    def special_tokens(self) -> tuple[str, ...]:
        """The tokens that the tokenizer calls special."""
        return tuple(text for text, (_, special) in self._added.items() if special)

    def added_tokens(self) -> tuple[str, ...]:
        """All tokens that are matched before the text is split, special or not."""
        return tuple(self._added)

    def token_id(self, token: str) -> int | None:
        """The id of an added token, or None where the text is not one token."""
        added = self._added.get(token)
        return None if added is None else added[0]

    def token_text(self, index: int) -> str:
        """The text of one id, as a template writes it."""
        for text, (known, _) in self._added.items():
            if known == index:
                return text
        return self.decode((index,))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included.

        Raises:
            RenderError: If an id is negative or not an int.
        """
        try:
            return str(self._backend.decode(list(ids), skip_special_tokens=False))
        except (TypeError, OverflowError) as exc:
            raise RenderError(f"token ids must be non-negative ints: {exc}") from exc

    def encode(self, text: str) -> bytes:
        """Packed ids of a text from its start; control tokens in it are control tokens."""
        return self._cached(("start", "", text), lambda: pack(self._raw(text)))

    def encode_ids(self, text: str) -> tuple[int, ...]:
        """``encode`` as a tuple of ids."""
        return unpack(self.encode(text))

    def encode_marked(self, text: str, marks: Marks, *, after: str | None = "") -> bytes:
        """Packed ids of a piece of rendered text; what is marked in it is plain text.

        Args:
            text: The piece, marks included.
            marks: The marks.
            after: None where the piece starts the prompt; the text of the control token before it;
                "" where any other ids are before it.
        """
        first, *rest = marks.split(text)
        packed = self.encode(first) if after is None else self._encode_after(after, first)
        for index, piece in enumerate(rest, start=1):
            if piece:
                packed += self._encode_plain(piece) if index % 2 else self._encode_after("", piece)
        return packed

    def _encode_after(self, before: str, text: str) -> bytes:
        return self._cached(("after", before, text), lambda: self._after(before, text))

    def _after(self, before: str, text: str) -> bytes:
        if not text:
            return b""
        if not before:
            if not self._marks_starts:
                return pack(self._raw(text))
            before = "\n"
        head, whole = self._raw(before), self._raw(before + text)
        if whole[: len(head)] != head:
            return pack(self._raw(text))
        return pack(whole[len(head) :])

    def _encode_plain(self, token: str) -> bytes:
        return self._cached(("plain", "", token), lambda: pack(self._plain(token)))

    def _plain(self, token: str) -> list[int]:
        """Ids of a control token's text without that token."""
        backend, text = self._backend, token
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        ids = [token.id for word in words for token in backend.model.tokenize(word)]
        control = {index for index, _ in self._added.values()}
        if not control.intersection(ids):
            return ids
        if len(token) == 1:
            raise RenderError(f"the tokenizer has no other form of the control token {token!r}")
        return [index for character in token for index in self._plain(character)]

    def _raw(self, text: str) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError):
            # Half a surrogate pair, where a harness cut a text: shown as U+FFFD. The library says
            # only that it wants a str.
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return list(self._backend.encode(whole, add_special_tokens=False).ids)

    def _cached(self, key: tuple[str, str, str], make: Callable[[], bytes]) -> bytes:
        packed = self._cache.get(key)
        if packed is None:
            packed = make()
            self._cache.put(key, packed)
        return packed


_OVERHEAD = 256
"""Bytes of an entry beside its text and ids, roughly."""


class _Cache:
    """Least recently used out first; safe between threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._items: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, str, str]) -> bytes | None:
        with self._lock:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
            return found

    def put(self, key: tuple[str, str, str], packed: bytes) -> None:
        size = _weight(key, packed)
        if size > self._limit:
            return
        with self._lock:
            if key not in self._items:
                self._size += size
            self._items[key] = packed
            while self._size > self._limit:
                old, ids = self._items.popitem(last=False)
                self._size -= _weight(old, ids)


def _weight(key: Iterable[str], packed: bytes) -> int:
    return sum(map(len, key)) + len(packed) + _OVERHEAD
