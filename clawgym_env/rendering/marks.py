"""Telling the template's own control tokens from text that looks like them.

A file that an agent reads may hold ``<|im_start|>``; rendered into a prompt it must stay text.
So control tokens in the conversation's strings are put between two private-use characters before
the template runs, and the tokenizer encodes what stands between them as plain text. The
characters are chosen so that the conversation does not hold them: no text is lost or forged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_PRIVATE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Marks:
    """Private-use characters for one rendering.

    Attributes:
        opening: Stands before a control token that is text.
        closing: Stands behind it.
        slot: Encloses the number of a place that is filled with ids later.
    """

    opening: str
    closing: str
    slot: str

    @classmethod
    def choices(cls) -> Iterator[Marks]:
        """Different marks, one after the other."""
        for code in range(_PRIVATE.start, _PRIVATE.stop - 2, 3):
            yield cls(chr(code), chr(code + 1), chr(code + 2))

    def slot_text(self, number: int) -> str:
        """The place holder with this number; not a part of any other."""
        return f"{self.slot}{number}{self.slot}"

    def unescape(self, text: str) -> str:
        """The text with the marks restored that a template wrote as JSON escapes."""
        if "\\udb80" not in text.lower():
            return text
        for mark in (self.opening, self.closing, self.slot):
            high, low = mark.encode("utf-16-be")[:2].hex(), mark.encode("utf-16-be")[2:].hex()
            text = re.sub(rf"\\u{high}\\u{low}", mark, text, flags=re.IGNORECASE)
        return text

    def remove(self, text: str) -> str:
        """The text without its marks."""
        return text.replace(self.opening, "").replace(self.closing, "")

    def split(self, text: str) -> list[str]:
        """The text as [text, marked, text, marked, …, text]; the marked pieces are plain text.

        A template that splits strings may tear marks apart. A lone mark still separates the text
        around it, so that the two sides cannot join into a control token.
        """
        if self.opening not in text and self.closing not in text:
            return [text]
        marks = self.opening + self.closing
        between = f"{self.opening}([^{marks}]*){self.closing}|[{marks}]"
        return [piece or "" for piece in re.split(between, text)]


class Quoter:
    """Puts marks around the control tokens in strings.

    Args:
        marks: The marks.
        pattern: Matches the control tokens; see ``control_pattern``.

    Attributes:
        collided: Whether a string held one of the marks, which makes them unusable.
    """

    def __init__(self, marks: Marks, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._replacement = rf"{marks.opening}\g<0>{marks.closing}"
        self._marks = (marks.opening, marks.closing, marks.slot)
        self.collided = False

    def __call__(self, text: str) -> str:
        """The text with its control tokens marked."""
        if not text.isascii() and any(mark in text for mark in self._marks):
            self.collided = True
        return self._pattern.sub(self._replacement, text)


def control_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """What matches any of the tokens, longer ones first; nothing where there are none."""
    longest_first = sorted(set(tokens), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
