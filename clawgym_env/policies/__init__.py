"""Who answers a model call: the step queue of an environment, a script, a replay, another server.

A policy sees canonical calls and returns replies; it knows nothing of the proxy, of capture or of
rendering, so that every policy is captured alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clawgym_env.policies.base import Closable, Policy
from clawgym_env.policies.replay import ReplayPolicy
from clawgym_env.policies.scripted import FunctionPolicy, Script, Scripted, ScriptedPolicy, as_reply
from clawgym_env.policies.step import StepPolicy

if TYPE_CHECKING:
    from clawgym_env.policies.openai_compatible import OpenAICompatiblePolicy

__all__ = [
    "Closable",
    "FunctionPolicy",
    "OpenAICompatiblePolicy",
    "Policy",
    "ReplayPolicy",
    "Script",
    "Scripted",
    "ScriptedPolicy",
    "StepPolicy",
    "as_reply",
]


def __getattr__(name: str) -> Any:
    # httpx takes a tenth of a second to import, and only this policy needs it.
    if name == "OpenAICompatiblePolicy":
        from clawgym_env.policies.openai_compatible import OpenAICompatiblePolicy

        return OpenAICompatiblePolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
