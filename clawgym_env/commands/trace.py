"""``clawgym trace``: what was captured, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Look at captured rollouts.", no_args_is_help=True)

Store = Annotated[
    Path, typer.Option("--store", envvar="CLAWGYM_STORE", help="The capture store's file.")
]
DEFAULT_STORE = Path("clawgym.db")


@app.command("list")
def list_rollouts(
    store: Store = DEFAULT_STORE,
    harness: Annotated[str | None, typer.Option(help="Only this harness.")] = None,
    task: Annotated[str | None, typer.Option(help="Only tasks whose id starts so.")] = None,
    limit: Annotated[int, typer.Option(help="Show the newest so many.", min=1)] = 30,
) -> None:
    """Show the newest rollouts of a store."""
    from clawgym_env.store import CaptureStore

    table = Table("rollout", "task", "harness", "outcome", "reward", "calls", "tokens")
    with CaptureStore(store, read_only=True) as opened:
        for row in opened.summaries(harness=harness, task=task, limit=limit):
            table.add_row(
                row.rollout_id[:12],
                row.task_id,
                row.harness,
                "(unfinished)" if row.outcome is None else row.outcome.value,
                "-" if row.reward is None else f"{row.reward:g}",
                str(row.calls),
                str(row.tokens),
            )
    Console().print(table)


@app.command()
def show(
    rollout: Annotated[str, typer.Argument(help="A rollout's id, or its first characters.")],
    store: Store = DEFAULT_STORE,
    model: Annotated[
        Path | None, typer.Option(help="Model directory, to show the sampled text.")
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="Show each call's new messages and its reply.")
    ] = False,
) -> None:
    """Show one rollout: its prefix tree, and with --messages what was said."""
    from clawgym_env.store import CaptureStore
    from clawgym_env.tree_text import tree_text
    from clawgym_env.trees import PrefixTree

    with CaptureStore(store, read_only=True) as opened:
        record = opened.rollout(opened.resolve(rollout))
    decode = None
    if model is not None:
        from clawgym_env.rendering import Renderer

        decode = Renderer.from_pretrained(model).decode
    print(tree_text(PrefixTree.from_rollouts([record]), decode))
    if messages:
        said = 0
        for call in record.calls:
            for message in call.call.messages[said:]:
                print(f"\n[{call.call.index}] {message.role}: {message.text}")
            reply = call.completion.message
            print(f"\n[{call.call.index}] reply: {reply.text}")
            for tool in reply.tool_calls:
                print(f"    -> {tool.name}({tool.arguments})")
            said = len(call.call.messages) + 1
