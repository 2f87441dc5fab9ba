"""The event loop in a thread that environments and trainers, which are synchronous, wait on.

One runtime holds one loop and one manager, whatever the number of rollouts. It knows nothing of
Gymnasium or of learning. Invariant: ``close`` ends every task it started and joins its thread, and
can be called any number of times, also when the start failed half-way.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import Harness
from clawgym_env.manager import RolloutManager
from clawgym_env.rendering import Renderer
from clawgym_env.sandboxes import get_backend
from clawgym_env.store import CaptureStore
from clawgym_env.tasks import TaskLimits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """What a runtime is made of; plain values, so that a spec that holds them pickles.

    Attributes:
        sandbox: Backend's name; None takes the best one that works here.
        store: Path of the capture store, or None to keep no record on disk.
        model: Local model directory whose tokenizer and template render prompts, or None.
        max_calls: Limit on model calls of a rollout, in place of the task's.
        max_tokens: Limit on sampled tokens of a rollout, in place of the task's.
        wall_s: Limit on wall time of a rollout in seconds, in place of the task's.
        max_live: Rollouts that may be live at once; further ones wait.
    """

    sandbox: str | None = None
    store: str | Path | None = None
    model: str | Path | None = None
    max_calls: int | None = None
    max_tokens: int | None = None
    wall_s: float | None = None
    max_live: int = 64

    def check(self, harness: Harness | None = None) -> None:
        """Fail early, before anything is started, on what a user can have got wrong.

        Raises:
            UnknownNameError: The sandbox's name is unknown.
            HarnessNotInstalledError: The harness is not installed.
            ConfigError: A limit is not a positive number.
        """
        if self.sandbox is not None:
            if not isinstance(self.sandbox, str):
                raise ConfigError(f"sandbox is a backend's name or None; got {self.sandbox!r}")
            get_backend(self.sandbox)
        for name in ("store", "model"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise ConfigError(f"{name} is a path or None; got {value!r}")
        for name in ("max_calls", "max_tokens", "wall_s", "max_live"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} is a positive number or None; got {value!r}")
            if name != "wall_s" and not isinstance(value, int):
                raise ConfigError(f"{name} is a whole number or None; got {value!r}")
        if harness is not None:
            harness.require_installed()

    def limits(self, limits: TaskLimits) -> TaskLimits:
        """The task's limits with this runtime's put in their place."""
        changes: dict[str, Any] = {}
        if self.max_calls is not None:
            changes["max_calls"] = int(self.max_calls)
        if self.max_tokens is not None:
            changes["max_tokens"] = int(self.max_tokens)
        if self.wall_s is not None:
            changes["wall_s"] = float(self.wall_s)
        return replace(limits, **changes)


class LoopThread:
    """An asyncio event loop in a daemon thread of its own.

    Sandboxes die with the thread that spawned them, so everything that spawns one runs here.
    """

    def __init__(self, name: str = "clawgym-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        An interrupt (Ctrl-C) in the waiting thread cancels the coroutine before it is raised.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop and return at once."""
        if not self._thread.is_alive():
            coroutine.close()
            raise ConfigError("the runtime is closed; make a new one")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs, stop the loop and join the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self.call(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Runtime(LoopThread):
    """A loop thread with a started :class:`~clawgym_env.manager.RolloutManager` on it.

    Args:
        settings: What to build.
        renderer: Used in place of one made from ``settings.model``.

    Raises:
        SandboxUnavailableError: The machine lacks what the sandbox needs.
        CaptureError: The store cannot be opened.
        RenderError: The model directory has no usable tokenizer or chat template.
    """

    def __init__(self, settings: RuntimeSettings, *, renderer: Renderer | None = None) -> None:
        settings.check()
        if renderer is None and settings.model is not None:
            renderer = Renderer.from_pretrained(settings.model)
        self.settings = settings
        self.store = None if settings.store is None else CaptureStore(settings.store)
        super().__init__()
        try:
            self.manager = RolloutManager(
                backend=settings.sandbox,
                store=self.store,
                renderer=renderer,
                max_live=settings.max_live,
                limits=settings.limits,
            )
            self.call(self.manager.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every rollout, the proxy and the store. Idempotent."""
        manager = getattr(self, "manager", None)
        if manager is not None and self._thread.is_alive():
            self.call(manager.close())
        super().close()
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
