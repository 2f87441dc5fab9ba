"""Directories that appear whole.

It knows nothing of what is in them. Invariant: a reader sees the old directory, the new one or
none, never a part of either.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_at_once(directory: Path) -> Iterator[Path]:
    """A draft directory that takes ``directory``'s place when the block ends without an error.

    A reader never sees a part of either. Only a crash between the two renames of a replacement
    leaves nothing at ``directory``; the old one is then inside its hidden sibling ``.NAME.*``.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    draft, old = scratch / "draft", scratch / "old"
    draft.mkdir()
    try:
        yield draft
        if directory.exists():
            directory.rename(old)
        try:
            draft.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
    finally:
        shutil.rmtree(scratch)
