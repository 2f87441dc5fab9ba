"""Harness adapters, by name; an adapter's module is imported when it is first asked for."""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from clawgym_env.errors import ConfigError, UnknownNameError
from clawgym_env.harnesses.base import MODEL, Endpoint, Harness, LaunchPlan, harness_home

__all__ = [
    "HARNESSES",
    "MODEL",
    "Endpoint",
    "Harness",
    "LaunchPlan",
    "get_harness",
    "harness_home",
]

_CLASSES = {
    "mini-swe-agent": ("clawgym_env.harnesses.mini_swe_agent", "MiniSweAgent"),
    "react": ("clawgym_env.harnesses.react", "ReAct"),
}

HARNESSES: tuple[str, ...] = tuple(sorted(_CLASSES))
"""Names of the harnesses."""


@cache
def get_harness(name: str) -> Harness:
    """The harness of that name; the same object each time.

    Args:
        name: One of ``HARNESSES``, or ``package.module:Class`` of an adapter of your own.

    Raises:
        UnknownNameError: There is none; the message suggests the nearest.
        ConfigError: ``package.module:Class`` cannot be imported or is no adapter.
    """
    if not isinstance(name, str):
        raise ConfigError(f"harness is a name or package.module:Class; got {name!r}")
    if ":" in name:
        return _own(name)
    if name not in _CLASSES:
        raise UnknownNameError("harness", name, HARNESSES)
    module, attribute = _CLASSES[name]
    return cast(Harness, getattr(importlib.import_module(module), attribute)())


def _own(name: str) -> Harness:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"harness {name!r}: {error}; give package.module:Class of an importable adapter"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Harness)):
        raise ConfigError(f"harness {name!r} is {found!r}; expected a subclass of Harness")
    try:
        return found()
    except Exception as error:
        raise ConfigError(
            f"harness {name!r} cannot be made: {type(error).__name__}: {error}; an adapter takes "
            "no argument and has version, install, remove, launch and script"
        ) from error
