"""Interleaved timing and the record of where it was taken; shared by the benchmarks.

Knows nothing of what is timed. Invariant: every variant runs once before any is timed, and the
variants take turns, so that a slow spell of the machine hits them alike.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    repeats: int,
    synchronise: Callable[[], Any] | None = None,
) -> dict[str, float]:
    """Median seconds of each variant.

    Args:
        variants: What to time, by name.
        repeats: Timed runs of each, after one that is not timed.
        synchronise: Waits for what a variant left running on a device.
    """
    wait = synchronise or (lambda: None)
    for variant in variants.values():
        variant()
    wait()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, variant in variants.items():
            start = time.perf_counter()
            variant()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def surroundings() -> dict[str, Any]:
    """Commit, machine and time, for a line of results."""
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "commit": git.stdout.strip() or None,
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON object to a file of JSON lines, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
