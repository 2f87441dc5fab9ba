"""``RolloutManager``: runs harnesses on tasks, any number at once, on one event loop.

It joins the proxy, the sandboxes, the harness adapters, the verifier runner and the store, and is
the one place that knows them all. It does not know who answers the calls (a policy does) nor what
becomes of a rollout. Invariants: every rollout ends in bounded time with an outcome; nothing of it
(process, directory, key) is left when ``run`` returns or is cancelled; what it captured is in the
store.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from clawgym_env.calls import CapturedCall, Outcome, Rollout
from clawgym_env.episode import Episode, EpisodeSettings
from clawgym_env.errors import ConfigError, SandboxUnavailableError
from clawgym_env.harnesses import Harness
from clawgym_env.policies import Policy
from clawgym_env.proxy import Proxy
from clawgym_env.rendering import Renderer
from clawgym_env.rooms import clear, make_room, sweep
from clawgym_env.sandboxes import SandboxBackend, default_backend, get_backend
from clawgym_env.store import CaptureStore
from clawgym_env.tasks import Task, TaskLimits

SOCKET_NAME = "model.sock"


class RolloutManager:
    """Owns one proxy and a directory of sandboxes, and runs rollouts through them.

    Args:
        backend: Sandbox backend's name, or None for the best one that works here.
        store: Where captured calls are committed; None keeps them in the returned record only.
        renderer: Gives prompts and replies their token ids; None captures without ids.
        max_live: Rollouts that may be live at once; further ones wait for their turn.
        limits: Turns a task's limits into those in force.

    Raises:
        UnknownNameError: No such backend.
        SandboxUnavailableError: The machine lacks what the backend needs.
    """

    def __init__(
        self,
        *,
        backend: str | None = None,
        store: CaptureStore | None = None,
        renderer: Renderer | None = None,
        max_live: int = 64,
        limits: Callable[[TaskLimits], TaskLimits] | None = None,
    ) -> None:
        if max_live < 1:
            raise ConfigError(f"max_live is at least 1; got {max_live}")
        self.backend: SandboxBackend = (
            default_backend() if backend is None else get_backend(backend)
        )
        missing = self.backend.check()
        if missing is not None:
            raise SandboxUnavailableError(
                f"sandbox {self.backend.name!r} does not work here: {missing}"
            )
        self.store = store
        self.renderer = renderer
        self.proxy = Proxy(store)
        self.outcomes: Counter[Outcome] = Counter()
        self.live = 0
        self._limits = limits or (lambda limits: limits)
        self._slots = asyncio.Semaphore(max_live)
        self._root: Path | None = None
        self._running: set[asyncio.Task[Rollout]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the proxy and make the directory that all sandboxes live in."""
        await asyncio.to_thread(sweep)
        self._root = make_room()
        await self.proxy.start(socket_path=self._root / SOCKET_NAME)

    async def close(self) -> None:
        """Cancel what runs, stop the proxy and remove the directory. Idempotent."""
        self._closed = True
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.proxy.close()
        if self._root is not None:
            root, self._root = self._root, None
            await asyncio.to_thread(clear, root)

    async def run(
        self,
        task: Task,
        harness: Harness,
        policy: Policy,
        *,
        group_id: str | None = None,
        seed: int | None = None,
        policy_version: int = 0,
        rollout_id: str | None = None,
        on_call: Callable[[CapturedCall], None] | None = None,
    ) -> Rollout:
        """Run one harness on one task until it is scored, and return the record.

        Args:
            task: What to do and how it is scored.
            harness: The adapter of the harness to launch.
            policy: Answers the harness' model calls.
            group_id: Shared by the rollouts of one (task, harness) that are sampled together.
            seed: Kept in the record.
            policy_version: Version of the weights when the rollout starts, kept in the record.
            rollout_id: A unique id; None makes one.
            on_call: Called on the event loop with each call once it is captured.

        Returns:
            The rollout. An infrastructure failure is an outcome, not an exception.

        Raises:
            asyncio.CancelledError: The caller cancelled; everything is cleaned up first.
        """
        if self._closed or self._root is None:
            raise ConfigError("the manager is not running; call start() first and not after close")
        current = asyncio.current_task()
        assert current is not None
        self._running.add(current)
        try:
            async with self._slots:
                self.live += 1
                try:
                    episode = Episode(
                        EpisodeSettings(
                            rollout_id=rollout_id or uuid.uuid4().hex,
                            task=task,
                            harness=harness,
                            policy=policy,
                            limits=self._limits(task.limits),
                            group_id=group_id,
                            seed=seed,
                            policy_version=policy_version,
                            started_at=time.time(),
                        ),
                        backend=self.backend,
                        proxy=self.proxy,
                        store=self.store,
                        renderer=self.renderer,
                        root=self._root,
                        on_call=on_call,
                    )
                    rollout = await episode.run()
                finally:
                    self.live -= 1
                self.outcomes[rollout.outcome] += 1
                return rollout
        finally:
            self._running.discard(current)
