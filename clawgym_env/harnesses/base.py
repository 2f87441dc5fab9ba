"""What a harness adapter says of its harness: how to install it, launch it and read its calls.

An adapter describes and starts nothing: the manager carries out the ``LaunchPlan`` in a sandbox.
This module knows nothing of sandboxes, tasks or policies. Its invariant: a harness gets the model
through an ``Endpoint`` alone, so whatever it is, the proxy sees all of its calls.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from clawgym_env.calls import CallKind, Message, ModelCall, Move
from clawgym_env.errors import HarnessNotInstalledError

CACHE_VARIABLE = "CLAWGYM_CACHE"
"""Environment variable that says where installed harnesses go instead of the user's cache."""

MODEL = "clawgym"
"""The model name that harnesses are given unless the manager has a reason for another."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a harness finds its model.

    Attributes:
        base_url: As seen from inside the sandbox, without a path such as ``/v1`` at the end:
            ``http://127.0.0.1:8080``.
        api_key: The rollout's secret.
        model: The model name to ask for.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start a harness in a sandbox.

    Attributes:
        argv: The command; its working directory is the workspace.
        env: Variables to set beside the sandbox's own; the secret is among them.
        files: Files to write before the start, path relative to the home folder to content.
        stdin: What the program reads, or None for an empty standard input.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    stdin: bytes | None = None


class Harness(ABC):
    """One harness.

    Attributes:
        name: What ``get_harness`` and the command line call it.
        title: Its name in environment ids.
        protocols: The wire protocols it speaks, the one that ``launch`` configures first.
        requirement: The pinned requirement that ``install`` fetches; None where the harness is part
            of this package.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    protocols: ClassVar[tuple[str, ...]]
    requirement: ClassVar[str | None] = None

    @property
    def env_id(self) -> str:
        """The Gymnasium id, such as ``clawgym/ReAct-v0``."""
        return f"clawgym/{self.title}-v0"

    @property
    def models(self) -> tuple[str, ...]:
        """The model names its requests carry when ``Endpoint.model`` is the default."""
        return (MODEL,)

    @abstractmethod
    def version(self) -> str | None:
        """The installed version, or None where it is not installed."""

    def installed(self) -> bool:
        """Whether ``launch`` would work."""
        return self.version() is not None

    def require_installed(self) -> None:
        """Do nothing where it is installed.

        Raises:
            HarnessNotInstalledError: It is not; the message holds the command that installs it.
        """
        if not self.installed():
            raise HarnessNotInstalledError(self.name)

    def mounts(self) -> tuple[tuple[Path, str], ...]:
        """What a sandbox must show, read-only: path on the host, absolute path inside.

        Both are the same, so that the plan's paths hold in a sandbox that hides nothing, too.

        Raises:
            HarnessNotInstalledError: It is not installed.
        """
        return ()

    @abstractmethod
    def install(self, progress: Callable[[str], None]) -> None:
        """Install it; does nothing where it is installed.

        Args:
            progress: Gets one line of text at a time.

        Raises:
            HarnessError: It could not be installed; nothing is left behind then.
        """

    @abstractmethod
    def remove(self) -> None:
        """Remove what ``install`` made; does nothing where there is nothing."""

    @abstractmethod
    def launch(
        self,
        instruction: str,
        endpoint: Endpoint,
        *,
        python: str,
        workspace_path: str,
        home_path: str,
        max_calls: int,
    ) -> LaunchPlan:
        """How to run it on an instruction.

        Args:
            instruction: What it is asked to do.
            endpoint: Its model.
            python: A Python 3 as seen from inside, good for the standard library (``-I -S``).
            workspace_path: The workspace as seen from inside.
            home_path: The home folder as seen from inside.
            max_calls: Model calls that the proxy will serve. The harness' own limit, where it has
                one, is set above it, so that the proxy is the one who ends the rollout.

        Raises:
            HarnessNotInstalledError: It is not installed.
        """

    def classify(self, call: ModelCall) -> CallKind:
        """Whether a call is the agent's own or one on the side, such as a title."""
        return "main"

    @abstractmethod
    def script(self, moves: Sequence[Move]) -> tuple[Message, ...]:
        """The replies that make this harness do the moves and then end, one a model call.

        Where the moves do not finish the task, a last reply that does is added.
        """


def harness_home() -> Path:
    """The folder that installed harnesses live in; it need not exist yet."""
    cache = os.environ.get(CACHE_VARIABLE)
    if cache:
        return Path(cache).absolute() / "harnesses"
    import platformdirs

    return Path(platformdirs.user_cache_dir("clawgym")) / "harnesses"


def same_place(*paths: Path) -> tuple[tuple[Path, str], ...]:
    """Mounts that show each path under its own name, behind symbolic links too."""
    wanted: dict[Path, str] = {}
    for path in paths:
        for place in (path.absolute(), path.resolve()):
            if not place.is_relative_to("/usr"):
                wanted[place] = str(place)
    return tuple(wanted.items())
