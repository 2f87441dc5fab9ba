"""``HarnessEnv``: one harness run at a time, one model call a step.

``reset`` starts a sandbox and the harness in it and returns at the first captured call; ``step``
answers the call that the last observation showed and returns at the next one, or at the end. The
environment does not know how a call is rendered, stored or sandboxed: the manager does that on an
event loop in a thread of its own, and this module only waits for it.

Invariant: at most one rollout is live, and none is after ``close``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium as gym

from clawgym_env.calls import Rollout
from clawgym_env.errors import ClawgymError, ConfigError
from clawgym_env.harnesses import get_harness
from clawgym_env.runtime import Runtime, RuntimeSettings
from clawgym_env.slot import Slot, choose_task, conversation_text, start_error
from clawgym_env.spaces import (
    Action,
    Observation,
    ReplySpace,
    observation_space,
    reply_from_action,
)
from clawgym_env.tasks import TaskSet, load_tasks


class HarnessEnv(gym.Env[Observation, Action]):
    """An opaque agent harness as a Gymnasium environment.

    Observation: ``{"messages": [...], "tools": [...]}`` of the call that waits, in OpenAI's form.
    Action: the reply, as text in the model's native format (tool calls included), a message dict,
    or ``{"token_ids": ..., "logprobs": ...}``. A text that does not parse as the model's format
    is delivered as plain text, as a model server would, and ``info["parse_error"]`` of that step
    says why. Reward: 0.0 until the end, then the verifier's score in [0, 1].

    ``terminated`` is True when the harness ended by itself and was verified; ``truncated`` when a
    limit (calls, tokens, wall time) or an infrastructure failure ended the rollout. After a limit
    the workspace is verified all the same. After an infrastructure failure there is no score:
    the reward is 0.0, ``info["verified"]`` is False and the record's reward is None, so that a
    trainer can drop the episode instead of learning from it.

    Args:
        harness: Name of the harness, see ``clawgym harness list``.
        tasks: Task set: a spec such as ``"key_lookup:level=2,split=train"``, a mapping or a list
            of them.
        sandbox: Sandbox backend's name; None takes bubblewrap where it works, else ``process``
            with a warning.
        store: Path of the capture store; None keeps the captured calls in memory for the length
            of the rollout only.
        model: Local directory of a model in Hugging Face form, whose tokenizer and chat template
            give the captured calls their token ids; None captures without ids.
        max_calls: Limit on model calls, in place of the task's.
        max_tokens: Limit on sampled tokens of a rollout, in place of the task's.
        wall_s: Limit on a rollout's wall time in seconds, in place of the task's.
        render_mode: ``"ansi"`` or ``"human"``: the waiting call's conversation as text.

    Raises:
        UnknownNameError: An unknown harness, task family or sandbox, with the near name.
        HarnessNotInstalledError: The harness is known but not installed.
        SandboxUnavailableError: The machine lacks what the sandbox needs.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 1}

    def __init__(
        self,
        harness: str,
        *,
        tasks: str | Mapping[str, Any] | list[Any] = "key_lookup",
        sandbox: str | None = None,
        store: str | Path | None = None,
        model: str | Path | None = None,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        wall_s: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"render_mode is 'ansi', 'human' or None; got {render_mode!r}")
        self.render_mode = render_mode
        self.observation_space = observation_space()
        self.action_space = ReplySpace()
        self.harness = get_harness(harness)
        self.tasks: TaskSet = load_tasks(tasks)
        self.settings = RuntimeSettings(
            sandbox=sandbox,
            store=store,
            model=model,
            max_calls=max_calls,
            max_tokens=max_tokens,
            wall_s=wall_s,
        )
        self.settings.check(self.harness)
        self._runtime: Runtime | None = None
        self._slot: Slot | None = None

    @property
    def rollout(self) -> Rollout | None:
        """The record of the rollout that has just ended; None while one runs."""
        state = None if self._slot is None else self._slot.state
        return None if state is None else state.rollout

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the harness on a task and return at its first model call.

        Args:
            seed: Seeds the choice of task.
            options: ``{"task": …}`` with a task id, an index into the task set or a
                :class:`~clawgym_env.tasks.Task`.

        Returns:
            The observation of the first call, and its info.

        Raises:
            HarnessStartError: The harness ended before its first call; carries its stderr's tail.
            ConfigError: An option is unknown, or names no task of the set.
        """
        super().reset(seed=seed)
        task = choose_task(self.tasks, options, self.np_random)
        if self._runtime is None:
            self._runtime = Runtime(self.settings)
            self._slot = Slot(self._runtime.manager, self.harness)
        assert self._slot is not None
        state = self._runtime.call(self._slot.begin(task, seed))
        if state.rollout is not None:
            raise start_error(self.harness.name, state.rollout)
        return state.observation, state.info()

    def step(self, action: Action) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """Answer the call that the last observation showed.

        Returns:
            Observation, reward, terminated, truncated and info, as Gymnasium has them.

        Raises:
            ConfigError: The action is none of the accepted forms; the call still waits.
            ClawgymError: No call waits: ``reset`` first.
        """
        if self._runtime is None or self._slot is None:
            raise ClawgymError("step() came while no model call waits; call reset() first")
        reply = reply_from_action(action)
        state = self._runtime.call(self._slot.answer(reply))
        return state.observation, state.reward, state.terminated, state.truncated, state.info()

    def render(self) -> Any:
        """The waiting call's conversation as text (``ansi``), or printed (``human``)."""
        if self.render_mode is None:
            gym.logger.warn("render() needs render_mode='ansi' or 'human' at gym.make")
            return None
        text = conversation_text(None if self._slot is None else self._slot.state)
        if self.render_mode == "human":
            print(text)
            return None
        return text

    def close(self) -> None:
        """End the live rollout, its sandbox and the proxy. Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            if self._slot is not None:
                runtime.call(self._slot.cancel())
            runtime.close()
