"""Where harnesses and verifiers run: one small interface, several backends.

A sandbox has a workspace, a home and at most one way out, to the model. This package knows nothing
of harnesses, tasks or the proxy beyond its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from clawgym_env.errors import UnknownNameError
from clawgym_env.sandboxes.base import (
    Area,
    Limits,
    Mount,
    Process,
    ProcessResult,
    Sandbox,
    SandboxBackend,
)
from clawgym_env.sandboxes.bubblewrap import BubblewrapBackend
from clawgym_env.sandboxes.process import ProcessBackend

BACKENDS: Mapping[str, Callable[[], SandboxBackend]] = MappingProxyType(
    {"bubblewrap": BubblewrapBackend, "process": ProcessBackend}
)
"""What makes each backend, by name, the better isolated first."""

__all__ = [
    "BACKENDS",
    "Area",
    "Limits",
    "Mount",
    "Process",
    "ProcessResult",
    "Sandbox",
    "SandboxBackend",
    "default_backend",
    "get_backend",
]


def get_backend(name: str) -> SandboxBackend:
    """The backend of this name; whether it works here, its ``check`` tells.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in BACKENDS:
        raise UnknownNameError("sandbox backend", name, BACKENDS)
    return BACKENDS[name]()


def default_backend() -> SandboxBackend:
    """The best isolated backend that works on this machine; ``process`` isolates nothing."""
    for make in BACKENDS.values():
        backend = make()
        if backend.check() is None:
            return backend
    return ProcessBackend()
