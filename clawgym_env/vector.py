"""``HarnessVectorEnv``: many harnesses in one process, on one event loop, behind one proxy.

It adds Gymnasium's vector API to slots: batching, the three autoreset modes, and ``send``/``recv``
so that slow sandboxes do not hold back fast ones. It knows nothing of sandboxes or protocols.
Invariant: an environment that fails ends its own episode with an outcome and leaves the others be.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from clawgym_env.calls import Reply, Rollout
from clawgym_env.errors import ClawgymError, ConfigError
from clawgym_env.harnesses import get_harness
from clawgym_env.runtime import Runtime, RuntimeSettings
from clawgym_env.slot import Slot, SlotState, choose_task, conversation_text, start_error
from clawgym_env.spaces import (
    Action,
    Observation,
    ReplySpace,
    observation_space,
    reply_from_action,
    terminal_observation,
)
from clawgym_env.tasks import TaskSet, load_tasks

Batch = dict[str, tuple[list[dict[str, Any]], ...]]


@dataclass(frozen=True, slots=True)
class Transition:
    """What one environment's step gave.

    Attributes:
        state: The new state; after a same-step reset, the new episode's first.
        reward: The step's reward.
        terminated: Whether the harness ended by itself.
        truncated: Whether a limit or an infrastructure failure ended the episode.
        final: The ended episode's state, where a same-step reset replaced it.
    """

    state: SlotState
    reward: float
    terminated: bool
    truncated: bool
    final: SlotState | None = None


class _Seat:
    """One environment of the vector: its slot, its task choice and where it stands."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.slot: Slot | None = None
        self.rng = np.random.default_rng()
        self.seed: int | None = None
        self.state: SlotState | None = None
        self.over = True
        self.future: concurrent.futures.Future[Transition] | None = None


class HarnessVectorEnv(VectorEnv[Batch, Sequence[Action], npt.NDArray[Any]]):
    """``num_envs`` harness environments that step together, or as they become ready.

    Observations are batched by key: ``{"messages": (m_0, …), "tools": (t_0, …)}`` with one list an
    environment. Actions are a sequence of ``num_envs`` replies. Rewards have shape
    ``(num_envs,)`` and dtype float64; terminations and truncations are bool of that shape. Infos
    hold the keys of :meth:`SlotState.info`, one entry an environment, with Gymnasium's masks.

    A harness that dies before its first call ends its own episode as truncated with the outcome
    ``start_failed``; only where all of a ``reset`` fail is :class:`HarnessStartError` raised.

    Args:
        num_envs: How many environments.
        harness: Name of the harness.
        tasks: Task set's spec, see :func:`clawgym_env.tasks.load_tasks`.
        sandbox: Sandbox backend's name, or None for the best one that works here.
        store: Path of the capture store, or None.
        model: Local model directory whose tokenizer renders prompts, or None.
        max_calls: Limit on model calls of a rollout, in place of the task's.
        max_tokens: Limit on sampled tokens of a rollout, in place of the task's.
        wall_s: Limit on a rollout's wall time in seconds, in place of the task's.
        autoreset_mode: Gymnasium's: ``NextStep``, ``SameStep`` or ``Disabled``.
        render_mode: ``"ansi"``, or None.

    Raises:
        ConfigError: A setting is wrong.
        HarnessNotInstalledError: The harness is known but not installed.
    """

    metadata = {"render_modes": ["ansi"], "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        *,
        harness: str,
        tasks: str | Mapping[str, Any] | list[Any] = "key_lookup",
        sandbox: str | None = None,
        store: str | Path | None = None,
        model: str | Path | None = None,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        wall_s: float | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ConfigError(f"num_envs is a whole number of at least 1; got {num_envs!r}")
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode is 'ansi' or None; got {render_mode!r}")
        try:
            self._mode = AutoresetMode(autoreset_mode)
        except ValueError:
            known = [mode.value for mode in AutoresetMode]
            raise ConfigError(f"autoreset_mode is one of {known}; got {autoreset_mode!r}") from None
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.metadata = {**self.metadata, "autoreset_mode": self._mode}
        self.single_observation_space = observation_space()
        self.single_action_space = ReplySpace()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.harness = get_harness(harness)
        self.tasks: TaskSet = load_tasks(tasks)
        self.settings = RuntimeSettings(
            sandbox=sandbox,
            store=store,
            model=model,
            max_calls=max_calls,
            max_tokens=max_tokens,
            wall_s=wall_s,
            max_live=num_envs,
        )
        self.settings.check(self.harness)
        self._runtime: Runtime | None = None
        self._seats = [_Seat(i) for i in range(num_envs)]

    @property
    def rollouts(self) -> tuple[Rollout | None, ...]:
        """The record of each environment's ended rollout; None while one runs."""
        return tuple(None if s.state is None else s.state.rollout for s in self._seats)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Batch, dict[str, Any]]:
        """Start every environment, or those of ``options["reset_mask"]``.

        Args:
            seed: One seed (environment ``i`` gets ``seed + i``), or one an environment.
            options: ``reset_mask``, a bool array of shape ``(num_envs,)``; ``task``, as in
                :meth:`HarnessEnv.reset`, for all that are reset.

        Raises:
            HarnessStartError: Every environment that was reset failed to start.
            ConfigError: An option or the seeds are wrong.
        """
        super().reset(seed=seed if isinstance(seed, int) else None)
        options = dict(options or {})
        chosen = self._masked(options.pop("reset_mask", None))
        for seat, value in zip(self._seats, self._seeds(seed), strict=True):
            if value is not None and seat in chosen:
                seat.rng = np.random.default_rng(value)
            seat.seed = value
        self._drain(chosen)
        runtime = self._ensure_runtime()
        begun = [runtime.submit(self._begin(seat, options)) for seat in chosen]
        concurrent.futures.wait(begun)
        states = [future.result() for future in begun]
        failed = [state.rollout for state in states if state.rollout is not None]
        if failed and len(failed) == len(states):
            raise start_error(self.harness.name, failed[0])
        infos: dict[str, Any] = {}
        for seat in chosen:
            assert seat.state is not None
            infos = self._add_info(infos, seat.state.info(), seat.index)
        return self._batch(self._seats), infos

    def step(
        self, actions: Sequence[Action]
    ) -> tuple[
        Batch,
        npt.NDArray[Any],
        npt.NDArray[Any],
        npt.NDArray[Any],
        dict[str, Any],
    ]:
        """Answer every environment's waiting call and wait for all of them.

        An environment whose episode ended in the last step is reset by this one and its action
        ignored, where the autoreset mode is ``NextStep``.

        Raises:
            ConfigError: An action is none of the accepted forms; no environment has moved.
            ClawgymError: ``reset`` was never called, or an ended environment was not reset.
        """
        self.send(actions, range(self.num_envs))
        observations, rewards, terminations, truncations, infos, _ = self.recv(self.num_envs)
        return observations, rewards, terminations, truncations, infos

    def send(self, actions: Sequence[Action], env_ids: Sequence[int]) -> None:
        """Answer the waiting calls of some environments and return at once.

        Args:
            actions: One reply an id.
            env_ids: Environments that are not under way, each once.

        Raises:
            ConfigError: Ids or actions are wrong; no environment has moved.
            ClawgymError: An environment was not reset.
        """
        ids = [int(i) for i in env_ids]
        if isinstance(actions, str) or not isinstance(actions, Sequence | np.ndarray):
            raise ConfigError(f"actions is a sequence with one reply an id; got {actions!r}")
        if len(actions) != len(ids):
            raise ConfigError(f"{len(ids)} env_ids came with {len(actions)} actions")
        if self.closed:
            raise ClawgymError("the environments are closed; make new ones")
        if len(set(ids)) != len(ids) or not all(0 <= i < self.num_envs for i in ids):
            raise ConfigError(f"env_ids are distinct and from 0 to {self.num_envs - 1}; got {ids}")
        runtime = self._runtime
        moves: list[tuple[_Seat, Reply | None]] = []
        for index, action in zip(ids, actions, strict=True):
            seat = self._seats[index]
            if seat.future is not None:
                raise ConfigError(f"environment {index} is under way; recv() it before you send")
            if runtime is None or seat.state is None:
                raise ClawgymError(f"environment {index} was never reset; call reset() first")
            resets = seat.over and self._mode is AutoresetMode.NEXT_STEP
            if seat.over and not resets:
                raise ClawgymError(
                    f"environment {index} has ended; reset it with options={{'reset_mask': …}}"
                )
            moves.append((seat, None if resets else reply_from_action(action)))
        assert runtime is not None or not moves
        for seat, reply in moves:
            assert runtime is not None
            seat.future = runtime.submit(self._move(seat, reply))

    def recv(
        self, min_ready: int = 1
    ) -> tuple[
        Batch,
        npt.NDArray[Any],
        npt.NDArray[Any],
        npt.NDArray[Any],
        dict[str, Any],
        npt.NDArray[Any],
    ]:
        """Wait until environments that were sent an action are ready.

        Args:
            min_ready: How many to wait for; more are returned where more are ready.

        Returns:
            Observations, rewards, terminations, truncations, infos and env_ids of those that are
            ready, ``k >= min_ready`` of them, ordered by id; arrays have shape ``(k,)``. Infos
            are indexed by environment id, as in :meth:`step`.

        Raises:
            ConfigError: Fewer than ``min_ready`` environments are under way.
        """
        under_way = {s.future: s for s in self._seats if s.future is not None}
        if not 1 <= min_ready <= len(under_way):
            raise ConfigError(f"min_ready is {min_ready}, but {len(under_way)} are under way")
        done: set[concurrent.futures.Future[Transition]] = set()
        waiting = set(under_way)
        while len(done) < min_ready:
            new, waiting = concurrent.futures.wait(
                waiting, return_when=concurrent.futures.FIRST_COMPLETED
            )
            done |= new
        ready = sorted((under_way[future] for future in done), key=lambda seat: seat.index)
        transitions = []
        for seat in ready:
            future, seat.future = seat.future, None
            assert future is not None
            transitions.append(future.result())
        infos: dict[str, Any] = {}
        for seat, move in zip(ready, transitions, strict=True):
            info = move.state.info()
            if move.final is not None:
                info = {
                    **info,
                    "final_obs": move.final.observation,
                    "final_info": move.final.info(),
                }
            infos = self._add_info(infos, info, seat.index)
        return (
            self._batch(ready),
            np.array([t.reward for t in transitions], dtype=np.float64),
            np.array([t.terminated for t in transitions], dtype=np.bool_),
            np.array([t.truncated for t in transitions], dtype=np.bool_),
            infos,
            np.array([seat.index for seat in ready], dtype=np.int64),
        )

    def render(self) -> tuple[str, ...] | None:
        """Each environment's waiting conversation as text."""
        if self.render_mode is None:
            gym.logger.warn("render() needs render_mode='ansi' at gym.make_vec")
            return None
        return tuple(conversation_text(seat.state) for seat in self._seats)

    def close_extras(self, **kwargs: Any) -> None:
        """End every rollout, the proxy and the store."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    async def _begin(self, seat: _Seat, options: dict[str, Any] | None) -> SlotState:
        assert self._runtime is not None
        if seat.slot is None:
            seat.slot = Slot(self._runtime.manager, self.harness)
        task = choose_task(self.tasks, options, seat.rng)
        seat.state = await seat.slot.begin(task, seat.seed)
        seat.over = False
        return seat.state

    async def _move(self, seat: _Seat, reply: Reply | None) -> Transition:
        if reply is None:
            state = await self._begin(seat, None)
            return self._settle(seat, Transition(state, 0.0, False, False))
        assert seat.slot is not None and seat.state is not None
        if seat.state.waiting is None:
            state = seat.state  # it failed to start, which no step has told yet
        else:
            state = seat.state = await seat.slot.answer(reply)
        move = Transition(state, state.reward, state.terminated, state.truncated)
        if state.rollout is not None and self._mode is AutoresetMode.SAME_STEP:
            new = await self._begin(seat, None)
            move = Transition(new, move.reward, move.terminated, move.truncated, state)
        return self._settle(seat, move)

    def _settle(self, seat: _Seat, move: Transition) -> Transition:
        seat.over = move.final is None and (move.terminated or move.truncated)
        return move

    def _batch(self, seats: Sequence[_Seat]) -> Batch:
        items: list[Observation] = [
            terminal_observation() if s.state is None else s.state.observation for s in seats
        ]
        return {key: tuple(item[key] for item in items) for key in ("messages", "tools")}

    def _masked(self, mask: Any) -> list[_Seat]:
        if mask is None:
            return self._seats
        array = np.asarray(mask)
        if array.shape != (self.num_envs,) or array.dtype != np.bool_:
            raise ConfigError(
                f"reset_mask is a bool array of shape ({self.num_envs},); "
                f"got dtype {array.dtype} and shape {array.shape}"
            )
        return [seat for seat, wanted in zip(self._seats, array, strict=True) if wanted]

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int):
            return [seed + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ConfigError(f"{self.num_envs} environments came with {len(seed)} seeds")
        return list(seed)

    def _drain(self, seats: Sequence[_Seat]) -> None:
        """Cancel what the seats have under way: a reset takes them over."""
        for seat in seats:
            future, seat.future = seat.future, None
            if future is not None:
                future.cancel()
                concurrent.futures.wait([future])
            if seat.slot is not None and self._runtime is not None:
                self._runtime.call(seat.slot.cancel())

    def _ensure_runtime(self) -> Runtime:
        if self._runtime is None:
            self._runtime = Runtime(self.settings)
        return self._runtime
