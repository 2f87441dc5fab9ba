"""``clawgym rollout``: run a harness on tasks under a policy and show what came of it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from clawgym_env.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from clawgym_env.calls import Rollout
    from clawgym_env.harnesses import Harness
    from clawgym_env.policies import Policy
    from clawgym_env.runtime import Runtime
    from clawgym_env.tasks import Task

POLICY_GROUP = "clawgym.policies"
"""Entry points of policies that other packages bring: name to a function of the argument."""

PolicyFactory = Callable[["Harness", "Task"], "Policy"]


def rollout(
    harness: Annotated[str, typer.Option(help="The harness' name.")] = "react",
    tasks: Annotated[str, typer.Option(help="Task set, such as key_lookup:level=2.")] = (
        "key_lookup"
    ),
    policy: Annotated[
        str,
        typer.Option(
            help="oracle (the task's own solution), openai:URL (any OpenAI-compatible server, key "
            "in OPENAI_API_KEY), or one of another package, such as engine:MODEL_DIR."
        ),
    ] = "oracle",
    n: Annotated[int, typer.Option("--n", "-n", help="How many rollouts.", min=1)] = 1,
    start: Annotated[int, typer.Option(help="Index of the first task.", min=0)] = 0,
    sandbox: Annotated[str | None, typer.Option(help="Sandbox backend.")] = None,
    store: Annotated[
        Path | None, typer.Option(envvar="CLAWGYM_STORE", help="Keep the calls in this store.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory whose tokenizer gives the token ids.")
    ] = None,
    max_calls: Annotated[int | None, typer.Option(help="Limit on model calls.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Limit on sampled tokens.")] = None,
    wall_s: Annotated[float | None, typer.Option(help="Limit on seconds of wall time.")] = None,
    live: Annotated[int, typer.Option(help="Rollouts at once.", min=1)] = 8,
    tree: Annotated[bool, typer.Option("--tree", help="Show each rollout's prefix tree.")] = False,
) -> None:
    """Run a harness on tasks under a policy and show what came of it."""
    from clawgym_env.harnesses import get_harness
    from clawgym_env.runtime import Runtime, RuntimeSettings
    from clawgym_env.tasks import load_tasks

    adapter = get_harness(harness)
    task_set = load_tasks(tasks)
    if start + n > len(task_set):
        raise ConfigError(f"tasks {tasks!r} hold {len(task_set)}; {start} + {n} goes beyond them")
    name, _, argument = policy.partition(":")
    if name == "engine" and model is None:
        model = Path(argument)
    settings = RuntimeSettings(
        sandbox=sandbox,
        store=store,
        model=model,
        max_calls=max_calls,
        max_tokens=max_tokens,
        wall_s=wall_s,
        max_live=live,
    )
    settings.check(adapter)
    factory = _policy_factory(name, argument)
    chosen = [task_set[i] for i in range(start, start + n)]
    try:
        with Runtime(settings) as runtime:
            records = runtime.call(_run_all(runtime, adapter, chosen, factory))
    except KeyboardInterrupt as stop:
        kept = "" if store is None else f"; what had ended is in {store}"
        print(f"stopped{kept}", file=sys.stderr)
        raise typer.Exit(130) from stop
    _report(records, tree)
    if store is not None:
        print(f"look at one with: clawgym trace show {records[0].rollout_id[:12]} --store {store}")
    else:
        print("nothing was kept; --store FILE keeps the calls for clawgym trace show")
    if all(record.outcome.is_infrastructure for record in records):
        raise typer.Exit(1)


async def _run_all(
    runtime: Runtime, harness: Harness, tasks: list[Task], factory: PolicyFactory
) -> list[Rollout]:
    return await asyncio.gather(
        *(runtime.manager.run(task, harness, factory(harness, task)) for task in tasks)
    )


def _policy_factory(name: str, argument: str) -> PolicyFactory:
    if name == "oracle":
        if argument:
            raise ConfigError(f"policy oracle takes no argument; got {argument!r}")
        return _oracle
    if name == "openai":
        return _openai(argument)
    points = {point.name: point for point in entry_points(group=POLICY_GROUP)}
    if name not in points:
        raise UnknownNameError("policy", name, ["oracle", "openai", *points])
    if not argument:
        raise ConfigError(f"policy {name}:ARGUMENT needs its argument, such as engine:MODEL_DIR")
    shared: Policy = points[name].load()(argument)
    return lambda harness, task: shared


def _oracle(harness: Harness, task: Task) -> Policy:
    from clawgym_env.policies import ScriptedPolicy

    if not task.solution:
        raise ConfigError(f"task {task.task_id!r} has no solution for the oracle to play")
    return ScriptedPolicy(harness.script(task.solution))


def _openai(url: str) -> PolicyFactory:
    import os

    from clawgym_env.policies import OpenAICompatiblePolicy

    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"policy openai:URL needs the API's root, http://HOST:PORT/v1; got {url!r}"
        )
    shared = OpenAICompatiblePolicy(url, os.environ.get("OPENAI_API_KEY", ""))
    return lambda harness, task: shared


def _report(records: list[Rollout], tree: bool) -> None:
    table = Table("rollout", "task", "outcome", "reward", "calls", "drift", "s")
    for record in records:
        table.add_row(
            record.rollout_id[:12],
            record.task_id,
            record.outcome.value,
            "-" if record.reward is None else f"{record.reward:g}",
            str(len(record.calls)),
            f"{record.drift_rate:.0%}",
            f"{record.finished_at - record.started_at:.2f}",
        )
    console = Console()
    console.print(table)
    for record in records:
        if record.detail:
            console.print(f"{record.rollout_id[:12]}: {record.detail}", markup=False)
    if tree:
        from clawgym_env.tree_text import tree_text
        from clawgym_env.trees import PrefixTree

        for record in records:
            print(tree_text(PrefixTree.from_rollouts([record])))
    scored = [record.reward for record in records if record.reward is not None]
    outcomes = Counter(record.outcome.value for record in records)
    mean = f"mean reward {sum(scored) / len(scored):.3f}" if scored else "no reward"
    counts = ", ".join(f"{k} {v}" for k, v in sorted(outcomes.items()))
    print(f"{len(records)} rollouts, {mean} over {len(scored)} scored; {counts}")
