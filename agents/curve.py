"""The learning curve of a run as a PNG.

It knows a run's metrics file and nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from clawgym_env.errors import ConfigError

Metrics = dict[str, float]
Success = tuple[float, float, float]
"""A success rate and the ends of its 95 % interval, each in [0, 1]."""


def read_metrics(path: Path) -> list[Metrics]:
    """A run's metrics, one a step; of a step that was done again after a kill, the last.

    Raises:
        ConfigError: A line in the middle is no JSON. A broken last line, which a kill leaves, is
            left out.
    """
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    steps: dict[int, Metrics] = {}
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:
                break
            raise ConfigError(f"{path}, line {number + 1}, is no JSON: {error}") from error
        steps[int(row["step"])] = row
    return [steps[step] for step in sorted(steps)]


def draw_curve(
    path: Path, metrics: Sequence[Metrics], *, before: Success, after: Success, title: str
) -> Path:
    """Draw training reward and held-out success over rollouts.

    Args:
        path: Where the PNG goes.
        metrics: What :func:`read_metrics` gave.
        before: Held-out success before training.
        after: The same after training.
        title: Of the figure.

    Returns:
        ``path``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    seen = [m["rollouts"] for m in metrics]
    axes.plot(seen, [m["rollout/reward"] for m in metrics], color="tab:blue", alpha=0.7)
    axes.plot([], [], color="tab:blue", alpha=0.7, label="training rollouts, mean reward")
    # On the last step, the evaluation after training stands for the one during it: it has more
    # tasks.
    points = {0.0: before}
    for m in metrics:
        if "eval/success" in m:
            points[m["rollouts"]] = (m["eval/success"], m["eval/low"], m["eval/high"])
    if seen:
        points[seen[-1]] = after
    rates, lows, highs = zip(*points.values(), strict=True)
    axes.plot(list(points), rates, "o-", color="tab:orange", label="held-out tasks, success")
    axes.fill_between(
        list(points), lows, highs, color="tab:orange", alpha=0.2, label="95 % interval"
    )
    axes.set(xlabel="rollouts", ylabel="reward, success", ylim=(-0.02, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return path
