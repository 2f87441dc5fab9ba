"""Harnesses from the package index, each in a virtual environment of its own.

A folder ``NAME-VERSION`` below the harness home holds the environment; its marker file is written
last, so a folder without one is the rest of an interrupted installation and counts as nothing.
Installations of one harness exclude each other by a lock file. An environment cannot be moved: its
scripts and its configuration name absolute paths, which sandboxes must show unchanged.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import venv
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clawgym_env.errors import HarnessError
from clawgym_env.harnesses.base import harness_home, same_place

_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class VenvInstall:
    """A distribution at a pinned version in its own virtual environment."""

    distribution: str
    version: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"

    @property
    def folder(self) -> Path:
        """The virtual environment; it need not exist."""
        return harness_home() / f"{self.distribution}-{self.version}"

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    def installed(self) -> bool:
        """Whether the installation is whole and its base interpreter is still there."""
        return self._marker.is_file() and self.python.exists()

    def mounts(self) -> tuple[tuple[Path, str], ...]:
        """What a sandbox must show for it: the environment and the interpreter that it links to."""
        base = Path(json.loads(self._marker.read_text())["base_prefix"])
        return same_place(self.folder, base)

    def install(self, progress: Callable[[str], None]) -> None:
        """Make the environment with the running Python, and pip-install into it.

        Args:
            progress: Gets pip's output, line by line.

        Raises:
            HarnessError: It failed; the message ends with the tail of pip's output.
        """
        with self._lock():
            if self.installed():
                progress(f"{self.requirement} is installed in {self.folder}")
                return
            shutil.rmtree(self.folder, ignore_errors=True)
            try:
                progress(f"making an environment in {self.folder}")
                venv.create(self.folder, with_pip=True, symlinks=True)
                self._pip_install(progress)
                marker = {"requirement": self.requirement, "base_prefix": sys.base_prefix}
                self._marker.write_text(json.dumps(marker))
            except (OSError, subprocess.CalledProcessError) as error:
                self._discard()
                raise HarnessError(
                    f"cannot make an environment in {self.folder}: {error}; Python's venv and "
                    "ensurepip modules are needed (on Debian: apt-get install python3-venv)"
                ) from error
            except BaseException:
                self._discard()
                raise
            progress(f"installed {self.requirement}")

    def remove(self) -> None:
        """Delete the environment; does nothing where there is none."""
        if self.folder.exists():
            with self._lock():
                self._discard()

    @property
    def _marker(self) -> Path:
        return self.folder / "clawgym.json"

    def _discard(self) -> None:
        self._marker.unlink(missing_ok=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        home = harness_home()
        try:
            home.mkdir(parents=True, exist_ok=True)
            lock = (home / f".{self.distribution}.lock").open("w")
        except OSError as error:
            raise HarnessError(
                f"cannot write to {home}: {error}; set CLAWGYM_CACHE to another folder"
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _pip_install(self, progress: Callable[[str], None]) -> None:
        command = [
            *(str(self.python), "-I", "-m", "pip", "install", self.requirement),
            *("--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
        ]
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip:
            assert pip.stdout is not None
            try:
                for line in pip.stdout:
                    tail.append(line.rstrip())
                    progress(tail[-1])
            except BaseException:
                pip.kill()
                raise
        if pip.returncode != 0:
            raise HarnessError(
                f"pip could not install {self.requirement} (exit status {pip.returncode}); its "
                "output ends with:\n" + "\n".join(tail)
            )
