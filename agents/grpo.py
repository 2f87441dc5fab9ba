"""``TreeGRPO``: group-relative policy optimisation on prefix trees, through an opaque harness.

One step reads top to bottom in :meth:`TreeGRPO._step`: choose tasks, run a group of rollouts for
each through the harness while the policy answers inside the proxy, compare each group's rewards,
merge its calls into a tree, pack the trees, and take a clipped policy-gradient step on the packed
rows (GRPO, arXiv 2402.03300; without the division by the standard deviation and by the length by
default, arXiv 2503.20783). It knows rollouts and nothing of how a harness is run.

Invariants: what is trained are the sampled ids under the weights' version that sampled them; a
rollout that failed for reasons of the infrastructure is counted and takes no part; a step whose
groups all have equal rewards changes nothing but the optimiser's count of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console

from agents import checkpoints
from agents.advantages import AdvantageCounts, rollout_advantages
from agents.attention import use_tree_attention
from agents.callbacks import Callback, CallbackList, StepResult
from agents.engine import Engine
from agents.engine_policy import EnginePolicy, SamplingOverride
from agents.grpo_settings import GRPOSettings
from agents.losses import LossMetrics, policy_loss
from agents.meters import RolloutMetrics
from agents.models.policy import CausalPolicy
from agents.packing import PackedBatch, pack
from agents.progress import Meter, ProgressCallback, default_console
from agents.rollouts import Collector, Env, EnvParts, Job, group_jobs
from agents.scoring import frozen_logprobs, score
from agents.visits import visits_of
from clawgym_env.calls import Rollout
from clawgym_env.errors import ConfigError
from clawgym_env.spaces import Observation
from clawgym_env.tasks import Task
from clawgym_env.trees import PrefixTree


class TreeGRPO:
    """Trains a policy on a harness environment.

        policy = CausalPolicy.from_pretrained("path/to/model")
        trainer = TreeGRPO(policy, gym.make("clawgym/ReAct-v0", tasks="key_lookup:level=2"))
        trainer.learn(50)
        trainer.save("runs/mine/step-000050")

    Args:
        policy: Trained in place.
        env: A harness environment, or its id; its harness, tasks, sandbox, store and limits are
            used, and the policy's own tokenizer renders the prompts.
        settings: See :class:`GRPOSettings`.
        reward: What a scored rollout is worth in training, such as its score plus a little for
            calls in the right form; the verifier's score where None. Metrics and evaluation keep
            to the verifier's.

    Raises:
        ConfigError: The environment is no harness environment, or the model cannot attend along a
            tree.
    """

    def __init__(
        self,
        policy: CausalPolicy,
        env: Env | EnvParts,
        settings: GRPOSettings | None = None,
        *,
        reward: Callable[[Rollout], float] | None = None,
    ) -> None:
        self.policy = policy
        self.parts = env if isinstance(env, EnvParts) else EnvParts.of(env)
        self.settings = settings or GRPOSettings()
        self.reward = reward
        self.step = 0
        self.rollouts_seen = 0
        use_tree_attention(policy.model)
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=self.settings.learning_rate,
            weight_decay=self.settings.weight_decay,
            betas=(0.9, 0.95),
        )
        self._rng = np.random.default_rng(self.settings.seed)
        self._collector: Collector | None = None
        self._engine: Engine | None = None
        self._logged: dict[str, float] = {}
        self._console: Console | None = None

    def learn(
        self,
        total_steps: int,
        callback: Callback | Iterable[Callback] | None = None,
        *,
        progress: bool = True,
    ) -> Self:
        """Train until ``total_steps`` steps are done, those before this call included.

        Args:
            total_steps: Steps since training began; a loaded trainer goes on from its own.
            callback: One or several.
            progress: Show rollouts, calls, reward, drift and tokens/s on stderr.

        Raises:
            ClawgymError: A rollout's record or the weights cannot be trained on; says why.
        """
        callbacks = _as_list(callback)
        self._console = default_console(progress)
        if self._console is not None:
            # The line comes after the other callbacks, so that it shows what they have logged.
            callbacks.callbacks.append(ProgressCallback(self._console))
        callbacks.on_training_start(self)
        try:
            while self.step < total_steps:
                if not callbacks.on_step(self, self._step(callbacks)):
                    break
        finally:
            callbacks.on_training_end(self)
            self._console = None
        return self

    def _step(self, callbacks: CallbackList) -> StepResult:
        settings = self.settings
        started = time.monotonic()
        tasks = self._choose_tasks(settings.tasks_per_step)
        jobs = group_jobs(tasks, settings.group_size, self._sampler, self._rng)
        rollouts = self._run(jobs, f"step {self.step + 1}")
        self.rollouts_seen += len(rollouts)
        callbacks.on_rollouts(self, rollouts)
        collected = time.monotonic()

        advantages, counts = rollout_advantages(self._valued(rollouts), settings.advantages)
        metrics = self._update(rollouts, advantages)
        self.step += 1

        seconds = collected - started
        sampled = RolloutMetrics.of(rollouts)
        self._logged = {f"rollout/{name}": value for name, value in sampled.scalars().items()}
        self._logged |= {f"train/{name}": value for name, value in metrics.items()}
        self._logged |= _group_scalars(counts)
        self._logged["time/rollouts_s"] = seconds
        self._logged["time/train_s"] = time.monotonic() - collected
        self._logged["time/tokens_per_s"] = sampled.sampled_tokens / seconds
        return StepResult(self.step, self.rollouts_seen, self._logged, rollouts)

    def _valued(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with their reward in training."""
        if self.reward is None:
            return list(rollouts)
        return [r if r.reward is None else replace(r, reward=self.reward(r)) for r in rollouts]

    def _update(
        self, rollouts: Sequence[Rollout], advantages: Mapping[str, float]
    ) -> dict[str, float]:
        """Optimiser steps on one step's rollouts; returns scalars."""
        settings = self.settings
        groups = _groups_with_gradient(rollouts, advantages)
        if not groups:
            return _no_update()
        trees = [PrefixTree.from_rollouts(group) for group in groups]
        parts: list[LossMetrics] = []
        norms: list[float] = []
        packed = per_call = 0
        model = self.policy.model
        with self._sampling_engine().paused():
            model.train()
            rate = min(1.0, (self.step + 1) / max(1, settings.warmup_steps))
            for group in self.optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate
            share = min(settings.minibatches, len(trees))
            batches = [self._rows(trees[i::share], advantages) for i in range(share)]
            for _ in range(settings.epochs):
                for rows in batches:
                    self.optimizer.zero_grad(set_to_none=True)
                    for row in rows:
                        scores = score(model, row, temperature=settings.temperature)
                        assert row.old_logprobs is not None
                        loss, metrics = policy_loss(
                            scores.logprobs,
                            row.old_logprobs,
                            row.behaviour_logprobs,
                            row.advantages,
                            row.weights,
                            settings.loss,
                            entropy=scores.entropy,
                        )
                        loss.backward()  # type: ignore[no-untyped-call]
                        parts.append(metrics)
                    norm = torch.nn.utils.clip_grad_norm_(
                        self.policy.parameters(), settings.max_grad_norm
                    )
                    self.optimizer.step()
                    norms.append(float(norm))
            model.eval()
            self.policy.updated()
        for tree in trees:
            stats = tree.stats()
            packed += stats.unique_tokens
            per_call += stats.call_tokens
        merged = asdict(LossMetrics.merge(parts))
        merged["loss"] = merged["loss"] / len(norms)
        merged["visits"] = merged["visits"] / settings.epochs
        return {
            **{name: float(value) for name, value in merged.items()},
            "grad_norm": sum(norms) / len(norms),
            "packed_tokens": float(packed),
            "call_tokens": float(per_call),
            "token_ratio": per_call / packed,
        }

    def _rows(
        self, trees: Sequence[PrefixTree], advantages: Mapping[str, float]
    ) -> list[PackedBatch]:
        """Packed rows of some groups, with the logprobs of the weights before the update."""
        settings = self.settings
        visits = visits_of(
            trees, advantages, aggregation=settings.aggregation, constant=settings.constant
        )
        device = self.policy.device
        rows = [row.to(device, torch.float32) for row in pack(trees, visits, settings.token_budget)]
        old = frozen_logprobs(self.policy.model, rows, temperature=settings.temperature)
        return [row.with_old_logprobs(old) for row in rows]

    def evaluate(
        self, tasks: Sequence[Task], *, attempts: int = 1, temperature: float | None = None
    ) -> list[Rollout]:
        """Run the policy on tasks without learning from them.

        Args:
            tasks: Usually held-out ones.
            attempts: Rollouts a task.
            temperature: Sampling temperature; None takes the training's, 0 is greedy.

        Returns:
            ``attempts`` rollouts a task, in order.
        """
        # The same seeds each time, so that evaluations compare and training draws as without them.
        seeds = np.random.default_rng(self.settings.seed).integers(
            2**31, size=len(tasks) * attempts
        )
        jobs = [
            Job(task, self._sampler(int(seed), temperature), seed=int(seed))
            for task, seed in zip((t for t in tasks for _ in range(attempts)), seeds, strict=True)
        ]
        return self._run(jobs, "evaluation")

    def predict(
        self, observation: Observation, *, deterministic: bool = False
    ) -> tuple[dict[str, Any], None]:
        """A reply to an observation, as an action for ``env.step``.

        Args:
            observation: What a harness environment observed.
            deterministic: Take the likeliest token each time.

        Returns:
            The action (``token_ids``, ``logprobs``, ``finish_reason``, ``policy_version``), and
            None for the state that Stable-Baselines3 returns here.
        """
        from agents.predicting import predict

        temperature = 0.0 if deterministic else self.settings.temperature
        return predict(
            self.policy.renderer,
            self._sampling_engine(),
            observation,
            temperature=temperature,
            max_tokens=self.settings.max_reply_tokens,
        ), None

    def log(self, scalars: Mapping[str, float]) -> None:
        """Add scalars to the present step's, for callbacks that come later in the list."""
        self._logged.update(scalars)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: policy, optimiser, counts and random state.

        Args:
            path: A directory, replaced if it is a checkpoint already.
        """
        checkpoints.save(
            Path(path),
            self.policy,
            self.optimizer.state_dict(),
            {
                "algorithm": "TreeGRPO",
                "settings": self.settings.to_dict(),
                "step": self.step,
                "rollouts_seen": self.rollouts_seen,
                "rng": self._rng.bit_generator.state,
            },
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: Env | EnvParts,
        *,
        settings: GRPOSettings | None = None,
        reward: Callable[[Rollout], float] | None = None,
    ) -> Self:
        """A trainer as it was saved, on an environment.

        Args:
            path: What :meth:`save` wrote.
            env: As for the constructor.
            settings: In place of the saved ones.
            reward: As for the constructor; it is not saved.

        Raises:
            ConfigError: There is no checkpoint there, or it is another algorithm's.
        """
        directory = Path(path)
        checkpoint = checkpoints.load(directory)
        state = checkpoint.state
        if state["algorithm"] != "TreeGRPO":
            raise ConfigError(f"{path} is a checkpoint of {state['algorithm']}, not of TreeGRPO")
        policy = CausalPolicy.load(directory / "policy")
        saved = GRPOSettings.from_dict(state["settings"])
        trainer = cls(policy, env, settings or saved, reward=reward)
        trainer.optimizer.load_state_dict(checkpoint.optimizer)
        trainer.step = state["step"]
        trainer.rollouts_seen = state["rollouts_seen"]
        trainer._rng.bit_generator.state = state["rng"]
        return trainer

    def close(self) -> None:
        """End the engine and the runtime. Idempotent; the trainer may be used again."""
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _choose_tasks(self, count: int) -> list[Task]:
        """Distinct tasks, as far as the set has so many."""
        tasks = self.parts.tasks
        size = len(tasks)
        chosen = self._rng.choice(size, size=count, replace=size < count)
        return [tasks[int(index)] for index in chosen]

    def _run(self, jobs: Sequence[Job], label: str) -> list[Rollout]:
        if self._collector is None:
            self._collector = Collector(
                self.parts, renderer=self.policy.renderer, live=self.settings.live
            )
        with Meter(label, len(jobs), self._console) as meter:
            return self._collector.collect(
                jobs,
                policy_version=self.policy.version,
                on_call=meter.on_call,
                on_rollout=meter.on_rollout,
            )

    def _sampler(self, seed: int, temperature: float | None = None) -> EnginePolicy:
        """Who answers a rollout: all replies come from the distribution that is trained."""
        chosen = self.settings.temperature if temperature is None else temperature
        override = SamplingOverride.on_policy(self.settings.max_reply_tokens)
        return EnginePolicy(
            self._sampling_engine(), replace(override, temperature=chosen), seed=seed
        )

    def _sampling_engine(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(self.policy, max_batch=self.settings.max_batch)
        return self._engine


def _as_list(callback: Callback | Iterable[Callback] | None) -> CallbackList:
    if callback is None:
        return CallbackList([])
    return CallbackList([callback] if isinstance(callback, Callback) else callback)


def _groups_with_gradient(
    rollouts: Sequence[Rollout], advantages: Mapping[str, float]
) -> list[list[Rollout]]:
    """The rollouts by group, without the groups in which no rollout has an advantage."""
    groups: dict[str | None, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.rollout_id in advantages:
            groups.setdefault(rollout.group_id, []).append(rollout)
    return [
        group for group in groups.values() if any(advantages[r.rollout_id] != 0.0 for r in group)
    ]


def _group_scalars(counts: AdvantageCounts) -> dict[str, float]:
    return {
        "group/groups": float(counts.groups),
        "group/equal_rewards": float(counts.equal),
        "group/single": float(counts.single),
    }


def _no_update() -> dict[str, float]:
    """What is logged when no group had a gradient."""
    names = [name for name in LossMetrics.__dataclass_fields__ if name != "ratio"]
    names += ["grad_norm", "packed_tokens", "call_tokens"]
    return {**dict.fromkeys(names, 0.0), "ratio": 1.0, "token_ratio": 1.0}
