"""One environment's rollout, call by call: what ``HarnessEnv`` and ``HarnessVectorEnv`` share.

A slot lives on the event loop; the environments, which are synchronous, call it through a runtime.
It knows nothing of Gymnasium's return values. Invariant: at most one rollout of a slot is live.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clawgym_env.calls import CapturedCall, PolicyRequest, Reply, Rollout
from clawgym_env.errors import ClawgymError, ConfigError, HarnessStartError
from clawgym_env.harnesses import Harness
from clawgym_env.manager import RolloutManager
from clawgym_env.policies import StepPolicy
from clawgym_env.spaces import Observation, observe, terminal_observation
from clawgym_env.tasks import Task, TaskSet


@dataclass(frozen=True, slots=True)
class SlotState:
    """Where a slot's rollout stands: at a call that waits, or at its end.

    Attributes:
        task: The task being done.
        waiting: The oldest call that waits, or None at the end.
        pending_calls: How many calls wait behind it.
        rollout: The finished record at the end, else None.
        parse_error: Why the last reply went out as plain text, else empty.
    """

    task: Task
    waiting: PolicyRequest | None
    pending_calls: int = 0
    rollout: Rollout | None = None
    parse_error: str = ""

    @property
    def observation(self) -> Observation:
        """The waiting call, or the terminal observation."""
        return terminal_observation() if self.waiting is None else observe(self.waiting.call)

    @property
    def reward(self) -> float:
        """The verifier's score at the end; 0.0 before it and where there is none."""
        if self.rollout is None or self.rollout.reward is None:
            return 0.0
        return self.rollout.reward

    @property
    def truncated(self) -> bool:
        """Whether a limit or an infrastructure failure ended the rollout."""
        if self.rollout is None:
            return False
        outcome = self.rollout.outcome
        return outcome.is_truncation or outcome.is_infrastructure

    @property
    def terminated(self) -> bool:
        """Whether the harness ended by itself and was scored."""
        return self.rollout is not None and not self.truncated

    def info(self) -> dict[str, Any]:
        """The info dict: the same keys with the same types at every step.

        Keys: ``task_id``, ``rollout_id`` (str); ``call_id``, ``call_kind``, ``model``,
        ``protocol`` (str, empty when no call waits); ``call_index`` (int, -1 when none waits);
        ``pending_calls`` (int); ``prompt_ids`` (list of int, empty without a model);
        ``parse_error``, ``outcome``, ``detail`` (str); ``verified`` (bool); ``rewards`` (dict of
        str to float).
        """
        call = None if self.waiting is None else self.waiting.call
        rollout = self.rollout
        rollout_id = call.rollout_id if call else rollout.rollout_id if rollout else ""
        return {
            "task_id": self.task.task_id,
            "rollout_id": rollout_id,
            "call_id": call.call_id if call else "",
            "call_index": call.index if call else -1,
            "call_kind": call.kind if call else "",
            "model": call.model if call else "",
            "protocol": call.protocol if call else "",
            "pending_calls": self.pending_calls,
            "prompt_ids": list(self.waiting.prompt_ids or ()) if self.waiting else [],
            "parse_error": self.parse_error,
            "outcome": str(rollout.outcome) if rollout else "",
            "detail": rollout.detail if rollout else "",
            "verified": rollout is not None and rollout.reward is not None,
            "rewards": dict(rollout.rewards) if rollout else {},
        }


@dataclass(slots=True)
class _Live:
    task: Task
    policy: StepPolicy
    run: asyncio.Task[Rollout]
    parse_errors: dict[str, str] = field(default_factory=dict)


class Slot:
    """Runs one harness at a time for an environment.

    Args:
        manager: A started manager on the loop that this slot is used on.
        harness: The adapter of the harness to launch.
    """

    def __init__(self, manager: RolloutManager, harness: Harness) -> None:
        self._manager = manager
        self._harness = harness
        self._live: _Live | None = None
        self.state: SlotState | None = None

    async def begin(self, task: Task, seed: int | None) -> SlotState:
        """Cancel what is live, start the harness on ``task`` and wait for its first call.

        A harness that ends before its first call gives a state without a call, whose rollout
        says why.
        """
        await self.cancel()
        policy = StepPolicy()
        parse_errors: dict[str, str] = {}

        def note(call: CapturedCall) -> None:
            parse_errors[call.call.call_id] = call.completion.parse_error or ""

        run = asyncio.ensure_future(
            self._manager.run(task, self._harness, policy, seed=seed, on_call=note)
        )
        self._live = _Live(task, policy, run, parse_errors)
        return await self._advance("")

    async def answer(self, reply: Reply) -> SlotState:
        """Answer the waiting call and wait for the next one, or for the end.

        Raises:
            ClawgymError: No call waits.
        """
        if self._live is None or self.state is None or self.state.waiting is None:
            raise ClawgymError("step() came while no model call waits; call reset() first")
        call_id = self.state.waiting.call.call_id
        self._live.policy.answer(call_id, reply)
        return await self._advance(call_id)

    async def cancel(self) -> None:
        """End the live rollout, if any, and wait until nothing of it is left."""
        live, self._live = self._live, None
        self.state = None
        if live is not None and not live.run.done():
            live.run.cancel()
            await asyncio.wait({live.run})

    async def _advance(self, answered: str) -> SlotState:
        assert self._live is not None
        live = self._live
        request = asyncio.ensure_future(live.policy.next_request())
        try:
            await asyncio.wait({request, live.run}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            request.cancel()
            await self.cancel()
            raise
        if live.run.done():
            request.cancel()
            self._live = None
            rollout = live.run.result()
            error = live.parse_errors.get(answered, "")
            self.state = SlotState(live.task, None, 0, rollout, error)
        else:
            error = live.parse_errors.get(answered, "")
            behind = len(live.policy.pending) - 1
            self.state = SlotState(live.task, request.result(), behind, None, error)
        return self.state


def choose_task(tasks: TaskSet, options: dict[str, Any] | None, rng: np.random.Generator) -> Task:
    """The task that ``options["task"]`` names, or a random one of the set.

    Args:
        tasks: The environment's task set.
        options: ``reset``'s options; ``{"task": …}`` holds a task id, an index or a ``Task``.
        rng: Draws the index where no task is named.

    Raises:
        ConfigError: An option is unknown, or names no task of the set.
    """
    unknown = sorted(set(options or {}) - {"task"})
    if unknown:
        raise ConfigError(f"unknown reset options {unknown}; the one known is 'task'")
    choice = (options or {}).get("task")
    if choice is None:
        return tasks[int(rng.integers(len(tasks)))]
    if isinstance(choice, Task):
        return choice
    if isinstance(choice, str):
        return tasks.get(choice)
    if isinstance(choice, bool) or not isinstance(choice, int | np.integer):
        raise ConfigError(f"options['task'] is a task id, an index or a Task; got {choice!r}")
    if not 0 <= choice < len(tasks):
        raise ConfigError(f"options['task'] is {choice}, but the set holds {len(tasks)} tasks")
    return tasks[int(choice)]


def start_error(harness: str, rollout: Rollout) -> HarnessStartError:
    """The error for a rollout that ended before its first call."""
    return HarnessStartError(
        harness,
        rollout.metadata.get("returncode"),
        str(rollout.metadata.get("stderr_tail", "")),
        f"did not start: {rollout.outcome.value}: {rollout.detail}",
    )


def conversation_text(state: SlotState | None) -> str:
    """The waiting call's conversation as plain text, for ``render``."""
    if state is None:
        return "(no rollout; call reset())"
    if state.rollout is not None:
        rollout = state.rollout
        reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
        return f"[{rollout.task_id}] {rollout.outcome.value}, reward {reward}"
    assert state.waiting is not None
    call = state.waiting.call
    lines = [f"[{state.task.task_id}] call {call.index} ({call.kind})"]
    for message in call.messages:
        lines.append(f"{message.role}: {message.text}")
        lines += [f"  -> {c.name}({c.arguments})" for c in message.tool_calls]
    return "\n".join(lines)
