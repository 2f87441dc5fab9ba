"""``clawgym harness``: list, install and remove harnesses."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from clawgym_env.errors import ConfigError

app = typer.Typer(help="List, install and remove harnesses.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The harness' name, see `clawgym harness list`.")]


@app.command("list")
def list_harnesses() -> None:
    """Show every harness, its environment id and whether it is installed."""
    from clawgym_env.harnesses import HARNESSES, get_harness

    table = Table("name", "environment", "protocols", "package", "installed")
    for column in table.columns[:2]:
        column.no_wrap = True  # what a user types
        column.overflow = "fold"
    for name in HARNESSES:
        harness = get_harness(name)
        table.add_row(
            name,
            harness.env_id,
            ", ".join(harness.protocols),
            harness.requirement or "(part of clawgym)",
            harness.version() or "no",
        )
    Console().print(table)


@app.command()
def install(name: Name) -> None:
    """Install a harness into an environment of its own."""
    from clawgym_env.harnesses import get_harness

    harness = get_harness(name)
    if harness.installed():
        print(f"{name} {harness.version()} is installed already")
        return
    harness.install(print)
    print(f"{name} {harness.version()} is installed; make it with gym.make({harness.env_id!r})")


@app.command()
def remove(name: Name) -> None:
    """Remove what `install` made."""
    from clawgym_env.harnesses import get_harness

    harness = get_harness(name)
    if harness.requirement is None:
        raise ConfigError(f"{name} is part of clawgym and cannot be removed")
    if not harness.installed():
        print(f"{name} is not installed")
        return
    harness.remove()
    print(f"{name} is removed")
