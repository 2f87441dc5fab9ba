"""agents: reinforcement learning of the model inside a harness.

Public names are imported when they are used, so that ``import agents`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.advantages import AdvantageSettings
    from agents.callbacks import Callback, CheckpointCallback, EvalCallback
    from agents.engine import Engine
    from agents.engine_policy import EnginePolicy, SamplingOverride
    from agents.grpo import TreeGRPO
    from agents.grpo_settings import GRPOSettings
    from agents.losses import LossSettings
    from agents.models.policy import CausalPolicy, LoraSettings
    from agents.rollouts import Collector
    from agents.runs import RunSettings

_HOMES = {
    "AdvantageSettings": "advantages",
    "Callback": "callbacks",
    "CausalPolicy": "models.policy",
    "CheckpointCallback": "callbacks",
    "Collector": "rollouts",
    "Engine": "engine",
    "EnginePolicy": "engine_policy",
    "EvalCallback": "callbacks",
    "GRPOSettings": "grpo_settings",
    "LoraSettings": "models.policy",
    "LossSettings": "losses",
    "RunSettings": "runs",
    "SamplingOverride": "engine_policy",
    "TreeGRPO": "grpo",
}

__all__ = [
    "AdvantageSettings",
    "Callback",
    "CausalPolicy",
    "CheckpointCallback",
    "Collector",
    "Engine",
    "EnginePolicy",
    "EvalCallback",
    "GRPOSettings",
    "LoraSettings",
    "LossSettings",
    "RunSettings",
    "SamplingOverride",
    "TreeGRPO",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"agents.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
