"""The progress display of a run: a live line on a terminal, plain lines elsewhere.

It shows rollouts, calls, reward, drift and tokens/s as they come, and one line for each step that
is done. It is told what happens and knows nothing of how; its counters may be fed from the event
loop's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from agents.callbacks import Callback, StepResult
from clawgym_env.calls import CapturedCall, Rollout

if TYPE_CHECKING:
    from agents.grpo import TreeGRPO

_EVERY_S = 20.0
"""Seconds between two lines where there is no terminal to redraw."""


class Meter:
    """Counts a batch of rollouts while it runs, and shows the counts.

    Args:
        label: What is being done, such as ``step 3``.
        total: How many rollouts there will be.
        console: Where to show it; None shows nothing.
    """

    def __init__(self, label: str, total: int, console: Console | None) -> None:
        self.label = label
        self.total = total
        self.done = self.calls = self.tokens = self.drifted = self.scored = 0
        self.reward = 0.0
        self._lock = threading.Lock()
        self._console = console
        self._started = self._shown = time.monotonic()
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def __enter__(self) -> Meter:
        if self._console is not None and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[counts]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.start()
            self._bar = self._progress.add_task(self.label, total=self.total, counts="")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def on_call(self, call: CapturedCall) -> None:
        """Count a captured call."""
        with self._lock:
            self.calls += 1
            self.tokens += len(call.completion.token_ids or ())
            self.drifted += call.drift is not None
            self._show()

    def on_rollout(self, rollout: Rollout) -> None:
        """Count a finished rollout."""
        with self._lock:
            self.done += 1
            if rollout.reward is not None:
                self.scored += 1
                self.reward += rollout.reward
            self._show()

    def advance(self, counts: str) -> None:
        """Count one of anything else, with a text of the caller's beside it."""
        with self._lock:
            self.done += 1
            self._show(counts)

    def counts(self) -> str:
        """The counts in one line."""
        seconds = max(1e-9, time.monotonic() - self._started)
        reward = f"{self.reward / self.scored:.2f}" if self.scored else "-"
        return (
            f"rollouts, {self.calls} calls, reward {reward}, drift {self.drifted}, "
            f"{self.tokens / seconds:,.0f} tok/s"
        )

    def _show(self, counts: str | None = None) -> None:
        text = counts or self.counts()
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=self.done, counts=text)
        elif self._console is not None and time.monotonic() - self._shown > _EVERY_S:
            self._shown = time.monotonic()
            self._console.print(f"{self.label}: {self.done}/{self.total} {text}", highlight=False)


class ProgressCallback(Callback):
    """One line a training step."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        """Print the step's line."""
        self.console.print(step_line(result), highlight=False)
        return True


def step_line(result: StepResult) -> str:
    """A training step in one line."""
    m = result.metrics
    parts = [
        f"step {result.step:3d}",
        f"{result.rollouts_seen:5d} rollouts",
        f"reward {m['rollout/reward']:.3f}",
        f"drift {m['rollout/drift']:.1%}",
        f"loss {m['train/loss']:+.4f}",
        f"kl {m['train/approx_kl']:.4f}",
        f"entropy {m['train/entropy']:.3f}",
        f"{m['time/tokens_per_s']:,.0f} tok/s",
        f"{m['time/rollouts_s']:.1f}+{m['time/train_s']:.1f} s",
    ]
    if "eval/success" in m:
        parts.append(f"held-out {m['eval/success']:.1%}")
    return "  ".join(parts)


def default_console(progress: bool) -> Console | None:
    """A console on stderr's terminal or log, or None where no progress is wanted."""
    return Console(stderr=True) if progress else None


def outcome_line(rollouts: Sequence[Rollout]) -> str:
    """How the rollouts of a batch ended, in one line."""
    counts: dict[str, int] = {}
    for rollout in rollouts:
        counts[rollout.outcome.value] = counts.get(rollout.outcome.value, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
