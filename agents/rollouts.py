"""Serving-driven collection: harnesses run, and the policy answers inside the proxy.

It knows the environment's parts and who answers; it knows nothing of advantages or losses. A
collector owns a runtime (event loop, proxy, sandboxes, store) for as long as it lives. Invariant:
``collect`` returns every rollout that it started, failed ones included, in the order asked for.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np

from clawgym_env.calls import CapturedCall, Rollout
from clawgym_env.env import HarnessEnv
from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import Harness
from clawgym_env.policies import Policy
from clawgym_env.rendering import Renderer
from clawgym_env.runtime import Runtime, RuntimeSettings
from clawgym_env.tasks import Task, TaskSet
from clawgym_env.vector import HarnessVectorEnv

Env = str | gym.Env[Any, Any] | HarnessVectorEnv


@dataclass(frozen=True, slots=True)
class EnvParts:
    """What a harness environment is made of.

    Attributes:
        harness: The adapter.
        tasks: The task set.
        settings: How its runtime is built.
    """

    harness: Harness
    tasks: TaskSet
    settings: RuntimeSettings

    @classmethod
    def of(cls, env: Env) -> EnvParts:
        """The parts of an environment, given itself or its id.

        Raises:
            ConfigError: It is no harness environment.
        """
        made = gym.make(env) if isinstance(env, str) else env
        inner = made.unwrapped
        if not isinstance(inner, HarnessEnv | HarnessVectorEnv):
            raise ConfigError(
                f"env is a clawgym environment or its id, such as 'clawgym/ReAct-v0'; got {made!r}"
            )
        return cls(inner.harness, inner.tasks, inner.settings)


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to run.

    Attributes:
        task: What to do.
        policy: Who answers.
        group_id: Shared by the rollouts that are compared with each other.
        seed: Kept in the record.
    """

    task: Task
    policy: Policy
    group_id: str | None = None
    seed: int | None = None


class Collector:
    """Runs batches of rollouts of one environment.

    Args:
        env: The environment, or its parts.
        renderer: Gives the calls their token ids; None captures without ids.
        live: Rollouts at once, in place of the environment's setting.

    Raises:
        ConfigError: ``env`` is no harness environment.
        SandboxUnavailableError: The machine lacks what the sandbox needs.
    """

    def __init__(
        self, env: Env | EnvParts, *, renderer: Renderer | None = None, live: int | None = None
    ) -> None:
        self.parts = env if isinstance(env, EnvParts) else EnvParts.of(env)
        settings = self.parts.settings
        if live is not None:
            settings = replace(settings, max_live=live)
        self.runtime = Runtime(settings, renderer=renderer)

    def collect(
        self,
        jobs: Sequence[Job],
        *,
        policy_version: int = 0,
        on_call: Callable[[CapturedCall], None] | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Run the jobs, as many at once as may be live.

        Args:
            jobs: What to run; jobs of a group are best given side by side, so that their common
                prompt is read once.
            policy_version: Version of the weights, kept in the records.
            on_call: Called in the runtime's thread for each captured call.
            on_rollout: Called in the runtime's thread for each finished rollout.

        Returns:
            One rollout a job, in order.
        """
        return self.runtime.call(self._collect(jobs, policy_version, on_call, on_rollout))

    async def _collect(
        self,
        jobs: Sequence[Job],
        version: int,
        on_call: Callable[[CapturedCall], None] | None,
        on_rollout: Callable[[Rollout], None] | None,
    ) -> list[Rollout]:
        async def one(job: Job) -> Rollout:
            rollout = await self.runtime.manager.run(
                job.task,
                self.parts.harness,
                job.policy,
                group_id=job.group_id,
                seed=job.seed,
                policy_version=version,
                on_call=on_call,
            )
            if on_rollout is not None:
                on_rollout(rollout)
            return rollout

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(job)) for job in jobs]
        except ExceptionGroup as errors:
            # They have one cause as a rule, and one error is what can be read and caught.
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    def close(self) -> None:
        """End what runs and close the runtime. Idempotent."""
        self.runtime.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def group_jobs(
    tasks: Sequence[Task],
    size: int,
    policy_of: Callable[[int], Policy],
    rng: np.random.Generator,
) -> list[Job]:
    """``size`` jobs a task, each task's under a fresh group id.

    Args:
        tasks: One group each.
        size: Rollouts a group.
        policy_of: Who answers a rollout of this seed.
        rng: Draws the seeds.
    """
    jobs = []
    for task in tasks:
        group_id = uuid.uuid4().hex
        for seed in rng.integers(2**31, size=size).tolist():
            jobs.append(Job(task, policy_of(seed), group_id, seed))
    return jobs
