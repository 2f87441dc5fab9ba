"""A training run in a directory: each stage is done once, and a kill loses one step at most.

    run.json          the settings
    captures.db       every model call, demonstrations included
    base/             a tiny model with random weights, where no model is given
    warm/             the policy after behaviour cloning
    before.json       held-out success before training
    checkpoints/      the newest steps
    metrics.jsonl     one line a step; tensorboard/ holds the same
    after.json        held-out success after training
    policy/           the trained policy, a Hugging Face directory
    curve.png         the learning curve

It joins the other modules and holds no algorithm. Invariant: a stage's output has its name only
once it is complete, so ``execute`` on an interrupted directory goes on where the last one stopped.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from agents import checkpoints
from agents.callbacks import (
    Callback,
    CheckpointCallback,
    EvalCallback,
    JsonlCallback,
    TensorBoardCallback,
)
from agents.curve import draw_curve, read_metrics
from agents.grpo import TreeGRPO
from agents.grpo_settings import GRPOSettings
from agents.meters import RolloutMetrics, wilson_interval
from agents.models.policy import CausalPolicy, LoraSettings, model_directory
from agents.models.tiny import Size, make_tiny
from agents.progress import Meter
from agents.rollouts import Collector, EnvParts
from agents.warmstart import (
    CloneSettings,
    CloneStep,
    clone,
    conversation_text,
    demonstrate,
    with_token_ids,
)
from clawgym_env.calls import Move, Rollout
from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import get_harness
from clawgym_env.runtime import RuntimeSettings
from clawgym_env.tasks import Task, get_family, load_tasks


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run does.

    Attributes:
        harness: The harness to train through.
        tasks: Training tasks.
        held_out: Evaluation tasks; no task may be in both.
        sandbox: Backend's name, or None for the best that works.
        model: Directory of a model in Hugging Face form; None makes a tiny one and warm-starts it.
        lora: LoRA rank, or 0 to train all weights.
        size: Size of the tiny model.
        vocab_size: Its vocabulary.
        demonstrations: How many to clone from; 0 for none.
        demonstrator: ``novice`` (the family's fallible one) or ``solution`` (the task's own).
        clone: Behaviour cloning.
        grpo: Tree GRPO.
        steps: Training steps.
        eval_every: Steps between two evaluations; 0 evaluates before and after only.
        eval_tasks: Tasks of an evaluation during training; all of ``held_out`` are used for the
            figures before and after.
        stop_at: End early once an evaluation during training reaches this success rate.
        max_calls: Limit on model calls of a rollout.
        wall_s: Limit on a rollout's wall time, in seconds.
        seed: Of everything that is drawn.
    """

    harness: str = "react"
    tasks: str = "key_lookup:level=1,split=train"
    held_out: str = "key_lookup:level=1,split=test,n=200"
    sandbox: str | None = None
    model: str | None = None
    lora: int = 0
    size: Size = "1m"
    vocab_size: int = 768
    demonstrations: int = 600
    demonstrator: str = "novice"
    clone: CloneSettings = field(default_factory=CloneSettings)
    grpo: GRPOSettings = field(default_factory=GRPOSettings)
    steps: int = 30
    eval_every: int = 10
    eval_tasks: int = 64
    stop_at: float | None = None
    max_calls: int | None = None
    wall_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.demonstrator not in ("novice", "solution"):
            raise ConfigError(f"demonstrator is 'novice' or 'solution'; got {self.demonstrator!r}")
        if self.model is None and not self.demonstrations:
            raise ConfigError(
                "a run without a model makes one from demonstrations; give --model or a number of "
                "demonstrations"
            )

    def to_json(self) -> str:
        """As the run's file holds it."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From what :meth:`to_json` gave.

        Raises:
            ConfigError: A name is unknown.
        """
        values = json.loads(text)
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"unknown run settings {unknown}; was it written by a newer clawgym?")
        values["clone"] = CloneSettings(**values["clone"])
        values["grpo"] = GRPOSettings.from_dict(values["grpo"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Success on the held-out tasks.

    Attributes:
        tasks: How many were scored.
        successes: How many got reward 1.
        reward: Mean reward.
        failed: How many failed for reasons of the infrastructure.
        example: A rollout's id to look at.
    """

    tasks: int
    successes: int
    reward: float
    failed: int
    example: str

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Evaluation:
        """The figures of an evaluation's rollouts."""
        metrics = RolloutMetrics.of(rollouts)
        won = [r for r in rollouts if r.reward is not None and r.reward >= 1.0]
        return cls(
            tasks=metrics.scored,
            successes=len(won),
            reward=metrics.reward,
            failed=metrics.rollouts - metrics.scored,
            example=(won or list(rollouts))[0].rollout_id,
        )

    @property
    def success(self) -> tuple[float, float, float]:
        """The success rate and its 95 % interval (Wilson)."""
        low, high = wilson_interval(self.successes, self.tasks)
        return self.successes / max(1, self.tasks), low, high

    def __str__(self) -> str:
        rate, low, high = self.success
        failed = f", {self.failed} without a score" if self.failed else ""
        return (
            f"{rate:.1%} of {self.tasks} held-out tasks (95 % interval {low:.1%} to "
            f"{high:.1%}{failed})"
        )


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to."""

    directory: Path
    before: Evaluation
    after: Evaluation
    curve: Path


def execute(
    directory: str | Path, settings: RunSettings | None = None, *, console: Console | None = None
) -> RunResult:
    """Start a run, or go on with one.

    Args:
        directory: The run's directory.
        settings: For a new run; None goes on with what the directory holds.
        console: Where progress is shown; None shows nothing.

    Raises:
        ConfigError: The directory holds a run already and settings were given, or holds none and
            none were.
    """
    return Run(Path(directory), settings, console).execute()


class Run:
    """One run; see :func:`execute`."""

    def __init__(
        self, directory: Path, settings: RunSettings | None, console: Console | None
    ) -> None:
        self.directory = directory
        self.console = console
        new = settings is not None
        self.settings = chosen = self._settings(settings)
        self.held_out = list(_all(chosen.held_out))
        self.parts = EnvParts(
            get_harness(chosen.harness),
            load_tasks(chosen.tasks),
            RuntimeSettings(
                sandbox=chosen.sandbox,
                store=directory / "captures.db",
                max_calls=chosen.max_calls,
                wall_s=chosen.wall_s,
                max_live=chosen.grpo.live,
            ),
        )
        self.parts.settings.check(self.parts.harness)
        if chosen.model is not None:
            model_directory(chosen.model)
        if new:
            # Only now: settings that cannot be met leave no run behind.
            _write(directory / "run.json", chosen.to_json())

    def execute(self) -> RunResult:
        """Do the stages that are not done."""
        threads = torch.get_num_threads()
        if self.settings.model is None and self.settings.size in ("200k", "1m"):
            # So small a model gains nothing by a second thread, and waits for it when the
            # sandboxes want the core.
            torch.set_num_threads(1)
        try:
            return self._stages()
        finally:
            torch.set_num_threads(threads)

    def _stages(self) -> RunResult:
        if (self.directory / "after.json").is_file():
            self._say(
                f"the run in {self.directory} is finished, and these are its figures; for another "
                "one give another directory"
            )
        with self._trainer() as trainer:
            before = self._evaluation("before", trainer)
            if not (self.directory / "after.json").is_file():
                trainer.learn(self.settings.steps, self._callbacks(), progress=self._shown)
                trainer.policy.save(self.directory / "policy")
            after = self._evaluation("after", trainer)
        curve = draw_curve(
            self.directory / "curve.png",
            read_metrics(self.directory / "metrics.jsonl"),
            before=before.success,
            after=after.success,
            title=f"{self.settings.harness} on {self.settings.tasks}",
        )
        return RunResult(self.directory, before, after, curve)

    @property
    def _shown(self) -> bool:
        return self.console is not None

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False)

    def _settings(self, given: RunSettings | None) -> RunSettings:
        path = self.directory / "run.json"
        if given is None:
            if not path.is_file():
                raise ConfigError(f"{self.directory} holds no run to go on with (no run.json)")
            try:
                return RunSettings.from_json(path.read_text())
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path} holds no run's settings ({type(error).__name__}: {error}); start a "
                    "run in another directory"
                ) from error
        if path.is_file():
            raise ConfigError(
                f"{self.directory} holds a run already; go on with it by --resume, or choose "
                "another directory"
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run's directory {self.directory} cannot be made: {error.strerror}"
            ) from error
        return given

    def _trainer(self) -> TreeGRPO:
        newest = checkpoints.latest(self.directory / "checkpoints")
        if newest is not None:
            self._say(f"going on from {newest}")
            return TreeGRPO.load(newest, self.parts)
        return TreeGRPO(self._start_policy(), self.parts, self.settings.grpo)

    def _start_policy(self) -> CausalPolicy:
        chosen = self.settings
        warm = self.directory / "warm"
        if warm.is_dir():
            return CausalPolicy.load(warm)
        demonstrations = self._demonstrations() if chosen.demonstrations else []
        if chosen.model is None:
            base = self.directory / "base"
            if not base.is_dir():
                texts = [conversation_text(rollout.calls[-1]) for rollout in demonstrations]
                make_tiny(
                    texts, base, size=chosen.size, vocab_size=chosen.vocab_size, seed=chosen.seed
                )
        else:
            base = Path(chosen.model)
        lora = LoraSettings(rank=chosen.lora, alpha=2 * chosen.lora) if chosen.lora else None
        policy = CausalPolicy.from_pretrained(base, lora=lora)
        if demonstrations:
            self._clone(policy, demonstrations)
            policy.save(warm)
        return policy

    def _demonstrations(self) -> list[Rollout]:
        chosen = self.settings
        tasks = self.parts.tasks
        count = min(chosen.demonstrations, len(tasks))
        rng = random.Random(chosen.seed)
        picked = [tasks[index] for index in rng.sample(range(len(tasks)), count)]
        with (
            Collector(self.parts) as collector,
            self._meter("demonstrations", count) as meter,
        ):
            rollouts = demonstrate(
                collector,
                picked,
                lambda task: self._moves(task, rng),
                on_rollout=meter.on_rollout,
            )
        metrics = RolloutMetrics.of(rollouts)
        self._say(
            f"{len(rollouts)} demonstrations through {chosen.harness} in "
            f"{collector.runtime.manager.backend.name}, {metrics.calls} captured calls; "
            f"the demonstrator succeeds at {metrics.success:.1%}"
        )
        return rollouts

    def _moves(self, task: Task, rng: random.Random) -> Sequence[Move]:
        if self.settings.demonstrator == "solution":
            return task.solution
        family = get_family(str(task.metadata.get("family", "")))
        return family.novice(task, rng)

    def _clone(self, policy: CausalPolicy, demonstrations: Sequence[Rollout]) -> None:
        rollouts = [with_token_ids(rollout, policy.renderer) for rollout in demonstrations]
        total = policy.parameter_counts()[1]
        with self._meter("behaviour cloning", 0) as meter:

            def show(step: CloneStep) -> None:
                meter.total = step.steps
                meter.advance(f"steps, loss {step.loss:.3f}")

            loss = clone(policy, rollouts, self.settings.clone, on_step=show)
        self._say(f"cloned into {total:,} parameters; loss {loss:.3f} nats a token")

    def _callbacks(self) -> list[Callback]:
        chosen = self.settings
        callbacks: list[Callback] = []
        if chosen.eval_every:
            tasks = self.held_out[: chosen.eval_tasks]
            callbacks.append(EvalCallback(tasks, every=chosen.eval_every, stop_at=chosen.stop_at))
        callbacks.append(JsonlCallback(self.directory / "metrics.jsonl"))
        callbacks.append(TensorBoardCallback(self.directory / "tensorboard"))
        callbacks.append(CheckpointCallback(self.directory / "checkpoints"))
        return callbacks

    def _evaluation(self, name: str, trainer: TreeGRPO) -> Evaluation:
        path = self.directory / f"{name}.json"
        if path.is_file():
            return Evaluation(**json.loads(path.read_text()))
        rollouts = trainer.evaluate(self.held_out)
        evaluation = Evaluation.of(rollouts)
        self._say(f"held-out success {name} training: {evaluation}")
        _write(path, json.dumps(asdict(evaluation)) + "\n")
        return evaluation

    def _meter(self, label: str, total: int) -> AbstractContextManager[Meter]:
        return Meter(label, total, self.console)


def _all(spec: str) -> Sequence[Task]:
    tasks = load_tasks(spec)
    return [tasks[index] for index in range(len(tasks))]


def _write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    os.replace(draft, path)


def report(result: RunResult) -> list[str]:
    """What a run's end is told in: before, after, the curve, and how to look at a rollout."""
    store = result.directory / "captures.db"
    policy = result.directory / "policy"
    before, after = result.before, result.after
    example: dict[str, Any] = {"rollout": after.example[:12], "store": store, "model": policy}
    return [
        f"success before training: {before}",
        f"success after training:  {after}",
        f"learning curve: {result.curve}",
        f"the run's files: {result.directory}",
        "look at a rollout with: clawgym trace show {rollout} --store {store} --model {model} "
        "--messages".format(**example),
    ]
