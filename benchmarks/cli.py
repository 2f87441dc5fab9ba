"""``list`` and ``run NAME``: the command line over the registry.

Knows the registry and no benchmark. Invariant: listing imports none of them.
"""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from benchmarks.registry import BENCHMARKS, load

app = typer.Typer(help="Measure clawgym.", no_args_is_help=True, pretty_exceptions_enable=False)


class _Lazy(TyperGroup):
    """A group whose commands are the registered benchmarks."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(BENCHMARKS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = typer.main.get_command(load(cmd_name))
        command.name = cmd_name
        return command


run_app = typer.Typer(cls=_Lazy, no_args_is_help=True, pretty_exceptions_enable=False)


@run_app.callback()
def run() -> None:
    """Run one benchmark; ``run NAME --help`` shows its options."""


app.add_typer(run_app, name="run")


@app.command("list")
def show() -> None:
    """List the benchmarks."""
    table = Table(box=None, show_header=False)
    for name, benchmark in sorted(BENCHMARKS.items()):
        table.add_row(f"[bold]{name}[/bold]", benchmark.summary)
    Console().print(table)
