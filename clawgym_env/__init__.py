"""clawgym_env: opaque agent harnesses as Gymnasium environments.

Importing this package registers the environment ids; everything else is imported when it is used,
so that the import is quick and needs no learning library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clawgym_env.registration import register_all

if TYPE_CHECKING:
    from clawgym_env.calls import CapturedCall, Completion, Message, ModelCall, Outcome, Rollout
    from clawgym_env.env import HarnessEnv
    from clawgym_env.errors import ClawgymError
    from clawgym_env.manager import RolloutManager
    from clawgym_env.runtime import Runtime, RuntimeSettings
    from clawgym_env.store import CaptureStore
    from clawgym_env.tasks import Task, TaskLimits, Verifier, load_tasks
    from clawgym_env.trees import PrefixTree
    from clawgym_env.vector import HarnessVectorEnv

_HOMES = {
    "CaptureStore": "store",
    "CapturedCall": "calls",
    "ClawgymError": "errors",
    "Completion": "calls",
    "HarnessEnv": "env",
    "HarnessVectorEnv": "vector",
    "Message": "calls",
    "ModelCall": "calls",
    "Outcome": "calls",
    "PrefixTree": "trees",
    "Rollout": "calls",
    "RolloutManager": "manager",
    "Runtime": "runtime",
    "RuntimeSettings": "runtime",
    "Task": "tasks",
    "TaskLimits": "tasks",
    "Verifier": "tasks",
    "load_tasks": "tasks",
}

__all__ = [
    "CaptureStore",
    "CapturedCall",
    "ClawgymError",
    "Completion",
    "HarnessEnv",
    "HarnessVectorEnv",
    "Message",
    "ModelCall",
    "Outcome",
    "PrefixTree",
    "Rollout",
    "RolloutManager",
    "Runtime",
    "RuntimeSettings",
    "Task",
    "TaskLimits",
    "Verifier",
    "load_tasks",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"clawgym_env.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_all()
