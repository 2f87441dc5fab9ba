"""The benchmarks by name. A new one is a file with a Typer ``app`` of one command, and a line here.

Knows no benchmark's code: each is imported when it runs, so that listing needs no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import typer

from clawgym_env.errors import ClawgymError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: its module and what it measures, in one line."""

    module: str
    summary: str


BENCHMARKS: dict[str, Benchmark] = {
    "tree_step": Benchmark(
        "benchmarks.tree_step", "a training step on packed trees against one call by call"
    ),
}


def load(name: str) -> typer.Typer:
    """The command of the benchmark ``name``.

    Raises:
        UnknownNameError: There is none of that name.
        ClawgymError: A package that it needs is not installed.
    """
    if name not in BENCHMARKS:
        raise UnknownNameError("benchmark", name, BENCHMARKS)
    module = BENCHMARKS[name].module
    try:
        app = importlib.import_module(module).app
    except ModuleNotFoundError as error:
        raise ClawgymError(
            f"benchmark {name!r} needs the package {error.name!r}; install it with: "
            "pip install 'clawgym[agents]'"
        ) from error
    assert isinstance(app, typer.Typer)
    return app
