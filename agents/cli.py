"""``clawgym train`` and ``clawgym demo``, contributed through the entry-point group.

They turn options into :class:`~agents.runs.RunSettings` and print what a run came to.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agents.demo import demo_settings
from agents.grpo_settings import GRPOSettings
from agents.runs import Run, RunSettings, execute, report
from clawgym_env.errors import ConfigError

train_app = typer.Typer(help="Train a policy through a harness by tree GRPO.")
demo_app = typer.Typer(help="Train a small model through the ReAct harness, start to end.")

DEFAULTS = RunSettings()
GRPO = GRPOSettings()


@train_app.callback(invoke_without_command=True)
def train(
    ctx: typer.Context,
    run: Annotated[Path, typer.Option(help="The run's directory.")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run there.")] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="Model directory; without one a tiny model is made and warm-started."),
    ] = None,
    lora: Annotated[int, typer.Option(help="LoRA rank; 0 trains all weights.", min=0)] = 0,
    harness: Annotated[str, typer.Option(help="The harness' name.")] = DEFAULTS.harness,
    tasks: Annotated[str, typer.Option(help="Training tasks.")] = DEFAULTS.tasks,
    held_out: Annotated[str, typer.Option(help="Evaluation tasks.")] = DEFAULTS.held_out,
    sandbox: Annotated[str | None, typer.Option(help="Sandbox backend.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps.", min=0)] = DEFAULTS.steps,
    demonstrations: Annotated[
        int | None,
        typer.Option(help="Demonstrations to clone from; default: some without --model, else 0."),
    ] = None,
    demonstrator: Annotated[
        str, typer.Option(help="novice (fallible) or solution (the task's own).")
    ] = DEFAULTS.demonstrator,
    tasks_per_step: Annotated[int, typer.Option(help="Groups a step.")] = GRPO.tasks_per_step,
    group_size: Annotated[int, typer.Option(help="Rollouts a group.")] = GRPO.group_size,
    learning_rate: Annotated[float, typer.Option(help="AdamW's.")] = GRPO.learning_rate,
    max_reply_tokens: Annotated[
        int, typer.Option(help="Bound on a reply's tokens.")
    ] = GRPO.max_reply_tokens,
    token_budget: Annotated[
        int, typer.Option(help="Most tokens of a packed row.")
    ] = GRPO.token_budget,
    live: Annotated[int, typer.Option(help="Rollouts at once.")] = GRPO.live,
    max_calls: Annotated[int | None, typer.Option(help="Limit on a rollout's calls.")] = None,
    wall_s: Annotated[float | None, typer.Option(help="Limit on a rollout's seconds.")] = None,
    eval_every: Annotated[
        int, typer.Option(help="Steps between evaluations; 0: before and after only.", min=0)
    ] = DEFAULTS.eval_every,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
) -> None:
    """Train a policy through a harness by tree GRPO; with --resume, go on after a kill."""
    if resume:
        given = sorted(
            f"--{name.replace('_', '-')}"
            for name in ctx.params
            if name not in ("run", "resume")
            and getattr(ctx.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"
        )
        if given:
            raise ConfigError(
                f"--resume goes on with the settings in {run / 'run.json'}; drop {', '.join(given)}"
            )
        _run(run, None)
        return
    if demonstrations is None:
        demonstrations = 0 if model is not None else DEFAULTS.demonstrations
    if model is not None and not model.is_dir():
        raise ConfigError(f"--model {model} is no directory; get one with: clawgym model get NAME")
    grpo = replace(
        GRPO,
        tasks_per_step=tasks_per_step,
        group_size=group_size,
        learning_rate=learning_rate,
        max_reply_tokens=max_reply_tokens,
        token_budget=token_budget,
        live=live,
        seed=seed,
    )
    settings = RunSettings(
        harness=harness,
        tasks=tasks,
        held_out=held_out,
        sandbox=sandbox,
        model=None if model is None else str(model.absolute()),
        lora=lora,
        demonstrations=demonstrations,
        demonstrator=demonstrator,
        clone=replace(DEFAULTS.clone, seed=seed),
        grpo=grpo,
        steps=steps,
        eval_every=eval_every,
        max_calls=max_calls,
        wall_s=wall_s,
        seed=seed,
    )
    _run(run, settings)


@demo_app.callback(invoke_without_command=True)
def demo(
    run: Annotated[Path, typer.Option(help="The run's directory.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    sandbox: Annotated[
        str | None, typer.Option(help="Sandbox backend; default: the best that works.")
    ] = None,
) -> None:
    """Train a small model through the ReAct harness; run again after a kill, it goes on."""
    settings = demo_settings(seed=seed, sandbox=sandbox)
    if not (run / "run.json").is_file():
        _run(run, settings)
        return
    there = Run(run, None, None).settings
    if (there.seed, there.sandbox) != (seed, sandbox):
        raise ConfigError(
            f"{run} holds a run with seed {there.seed} and sandbox {there.sandbox}; give another "
            f"directory for seed {seed} and sandbox {sandbox}"
        )
    _run(run, None)


def _run(directory: Path, settings: RunSettings | None) -> None:
    logging.getLogger("clawgym_env").setLevel(logging.ERROR)
    try:
        result = execute(directory, settings, console=Console(stderr=True))
    except KeyboardInterrupt as stop:
        print(
            f"\nstopped; go on with: clawgym train --resume --run {directory}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from stop
    print()
    for line in report(result):
        print(line)
