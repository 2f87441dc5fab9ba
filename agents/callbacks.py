"""What can be hooked into ``learn``: evaluation, checkpoints, logs, and what a user writes.

Callbacks see the trainer and the step's results; they know nothing of how a step is computed.
Invariant: they are called in the trainer's thread, in the order given, and a callback that raises
stops the training with its own error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from agents.meters import RolloutMetrics, wilson_interval
from clawgym_env.calls import Rollout
from clawgym_env.errors import ConfigError
from clawgym_env.tasks import Task

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from agents.grpo import TreeGRPO


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step gave.

    Attributes:
        step: Its number, from 1.
        rollouts_seen: Rollouts collected since training began.
        metrics: Scalars by name.
        rollouts: The step's rollouts.
    """

    step: int
    rollouts_seen: int
    metrics: dict[str, float]
    rollouts: Sequence[Rollout]


class Callback:
    """Base of all callbacks; every method may be overridden."""

    def on_training_start(self, trainer: TreeGRPO) -> None:
        """Called before the first step of a ``learn``."""

    def on_rollouts(self, trainer: TreeGRPO, rollouts: Sequence[Rollout]) -> None:
        """Called after a step's rollouts, before the weights change."""

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        """Called after a step; False ends the training."""
        return True

    def on_training_end(self, trainer: TreeGRPO) -> None:
        """Called after the last step, also when an error or an interrupt ended the training."""


class CallbackList(Callback):
    """Several callbacks as one."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_training_start(self, trainer: TreeGRPO) -> None:
        """Pass it on."""
        for callback in self.callbacks:
            callback.on_training_start(trainer)

    def on_rollouts(self, trainer: TreeGRPO, rollouts: Sequence[Rollout]) -> None:
        """Pass it on."""
        for callback in self.callbacks:
            callback.on_rollouts(trainer, rollouts)

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        """Pass it on to all; False where one of them says so."""
        return all([callback.on_step(trainer, result) for callback in self.callbacks])

    def on_training_end(self, trainer: TreeGRPO) -> None:
        """Pass it on."""
        for callback in self.callbacks:
            callback.on_training_end(trainer)


class EvalCallback(Callback):
    """Evaluates on held-out tasks every few steps and logs ``eval/…`` scalars.

    Args:
        tasks: The held-out tasks.
        every: Steps between two evaluations.
        stop_at: End the training once the success rate reaches this.
    """

    def __init__(self, tasks: Sequence[Task], *, every: int, stop_at: float | None = None) -> None:
        if every < 1 or not tasks:
            raise ConfigError(f"EvalCallback needs tasks and every >= 1; got {len(tasks)}, {every}")
        self.tasks = tasks
        self.every = every
        self.stop_at = stop_at

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        """Evaluate if it is time."""
        if result.step % self.every:
            return True
        metrics = RolloutMetrics.of(trainer.evaluate(self.tasks))
        low, high = wilson_interval(round(metrics.success * metrics.scored), metrics.scored)
        trainer.log(
            {
                "eval/success": metrics.success,
                "eval/low": low,
                "eval/high": high,
                "eval/reward": metrics.reward,
                "eval/failed": float(metrics.rollouts - metrics.scored),
            }
        )
        return self.stop_at is None or metrics.success < self.stop_at


class CheckpointCallback(Callback):
    """Saves the trainer every few steps, and when training ends.

    Args:
        directory: Where checkpoints go, one directory a step.
        every: Steps between two checkpoints.
        keep: How many of the newest to keep.
    """

    def __init__(self, directory: str | Path, *, every: int = 1, keep: int = 2) -> None:
        if every < 1 or keep < 1:
            raise ConfigError(f"CheckpointCallback needs every and keep >= 1; got {every}, {keep}")
        self.directory = Path(directory)
        self.every = every
        self.keep = keep

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        """Save if it is time."""
        if result.step % self.every == 0:
            trainer.save(self.directory / f"step-{result.step:06d}")
            self._prune()
        return True

    def _prune(self) -> None:
        from agents.checkpoints import remove, steps

        for path in steps(self.directory)[: -self.keep]:
            remove(path)


class JsonlCallback(Callback):
    """Appends each step's scalars to a file, one JSON object a line."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def on_training_start(self, trainer: TreeGRPO) -> None:
        """Open the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a")

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        """Write a line."""
        assert self._file is not None
        line = {"step": result.step, "rollouts": result.rollouts_seen, **result.metrics}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        return True

    def on_training_end(self, trainer: TreeGRPO) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardCallback(Callback):
    """Writes each step's scalars as TensorBoard events."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._writer: SummaryWriter | None = None

    def on_training_start(self, trainer: TreeGRPO) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.directory))

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        """Write the scalars."""
        assert self._writer is not None
        for name, value in result.metrics.items():
            self._writer.add_scalar(name, value, result.step)
        self._writer.flush()
        return True

    def on_training_end(self, trainer: TreeGRPO) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
