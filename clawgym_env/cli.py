"""The ``clawgym`` command: one file a subcommand under ``commands``, and those of other packages.

``agents`` and ``benchmarks`` contribute theirs through the entry-point group ``clawgym.commands``;
they are imported when they are called, so that the rest runs quickly and without torch. Every
:class:`~clawgym_env.errors.ClawgymError` ends as one line on stderr and exit status 2.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points

import typer

from clawgym_env.commands import doctor, harness, proxy, rollout, trace
from clawgym_env.errors import ClawgymError

GROUP = "clawgym.commands"

app = typer.Typer(
    name="clawgym",
    help="Agent harnesses as Gymnasium environments.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("doctor")(doctor.doctor)
app.command("rollout")(rollout.rollout)
app.command("proxy")(proxy.proxy)
app.add_typer(trace.app, name="trace")
app.add_typer(harness.app, name="harness")


def add_plugins(wanted: str | None) -> None:
    """Add the commands of other packages; only the one that is called is imported."""
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        if point.name == wanted:
            app.add_typer(_load(point), name=point.name)
        else:
            package = point.module.partition(".")[0]
            summary = f"Of the package {package}; see: clawgym {point.name} --help"
            app.add_typer(typer.Typer(help=summary), name=point.name)


def _load(point: EntryPoint) -> typer.Typer:
    try:
        loaded = point.load()
    except ImportError as error:
        raise ClawgymError(
            f"the command {point.name!r} cannot be imported from {point.value}: {error}; "
            "install what it needs with: pip install 'clawgym[agents]'"
        ) from error
    assert isinstance(loaded, typer.Typer)
    return loaded


def main() -> None:
    """Run the command line and exit."""
    try:
        add_plugins(next((word for word in sys.argv[1:] if not word.startswith("-")), None))
        app()
    except ClawgymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
