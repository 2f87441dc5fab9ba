"""What a user chooses of tree GRPO: plain values, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from agents.advantages import AdvantageSettings
from agents.losses import LossSettings
from agents.visits import Aggregation
from clawgym_env.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GRPOSettings:
    """Settings of :class:`agents.grpo.TreeGRPO`.

    Attributes:
        tasks_per_step: Groups a step.
        group_size: Rollouts a group.
        learning_rate: AdamW's.
        warmup_steps: Steps in which the learning rate rises to its value.
        weight_decay: AdamW's.
        epochs: Passes over a step's rollouts; from the second on the clip matters.
        minibatches: Optimiser steps a pass; groups are spread over them.
        max_grad_norm: Bound on the gradient's norm.
        advantages: Baseline and scale within a group.
        loss: Clip, importance correction, KL.
        aggregation: What the loss averages over: ``token``, ``rollout``, ``call`` or ``constant``.
        constant: The fixed length of ``constant``.
        temperature: Sampling temperature of training rollouts.
        max_reply_tokens: Bound on one reply's tokens.
        token_budget: Most tokens of a packed row; bounds the memory of a step.
        live: Rollouts at once.
        max_batch: Sequences at once in the engine.
        seed: Of the choice of tasks and of sampling.
    """

    tasks_per_step: int = 8
    group_size: int = 8
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    weight_decay: float = 0.0
    epochs: int = 1
    minibatches: int = 1
    max_grad_norm: float = 1.0
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    aggregation: Aggregation = "token"
    constant: float | None = None
    temperature: float = 1.0
    max_reply_tokens: int = 256
    token_budget: int = 8192
    live: int = 32
    max_batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "tasks_per_step",
            "epochs",
            "minibatches",
            "max_reply_tokens",
            "token_budget",
            "live",
            "max_batch",
            "learning_rate",
            "max_grad_norm",
            "temperature",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is above 0; got {getattr(self, name)!r}")
        if self.group_size < 2:
            raise ConfigError(
                f"group_size is at least 2, as a rollout is compared with others of its group; "
                f"got {self.group_size}"
            )
        if self.minibatches > self.tasks_per_step:
            raise ConfigError(
                f"minibatches {self.minibatches} exceed tasks_per_step {self.tasks_per_step}; "
                "a group is not cut"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From what :meth:`to_dict` gave.

        Raises:
            ConfigError: A name is unknown.
        """
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown GRPO settings {unknown}; known: {sorted(known)}")
        fields = dict(values)
        fields["advantages"] = AdvantageSettings(**fields.get("advantages", {}))
        fields["loss"] = LossSettings(**fields.get("loss", {}))
        return cls(**fields)
