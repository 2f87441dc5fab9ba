"""One rollout from an empty sandbox to a scored record.

    create -> put files -> register key -> launch -> wait -> kill -> seal -> score -> destroy

It knows one harness run and nothing of others. Invariant: ``run`` returns a record or is
cancelled; either way the processes are dead, the key is void, the directories are gone and the
store holds every captured call and the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from clawgym_env.calls import CapturedCall, Outcome, Rollout
from clawgym_env.errors import CaptureError, HarnessError, SandboxError, VerifierError
from clawgym_env.harnesses import Endpoint, Harness, LaunchPlan
from clawgym_env.policies import Policy
from clawgym_env.proxy import Proxy, Session
from clawgym_env.rendering import Renderer
from clawgym_env.sandboxes import Limits, Mount, ProcessResult, Sandbox, SandboxBackend
from clawgym_env.scoring import score
from clawgym_env.store import CaptureStore
from clawgym_env.tasks import Task, TaskLimits

OUTPUT_KB = 16 * 1024
SEAL_TIMEOUT_S = 5.0
# A harness gets this long to wind up after a limit or a failure; one that only retries the refused
# call must not hold the rollout until its wall time is over.
GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What one rollout is; see :meth:`clawgym_env.manager.RolloutManager.run`."""

    rollout_id: str
    task: Task
    harness: Harness
    policy: Policy
    limits: TaskLimits
    group_id: str | None
    seed: int | None
    policy_version: int
    started_at: float


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the harness' run ended, before anything is scored."""

    outcome: Outcome
    detail: str
    process: ProcessResult | None


class Episode:
    """Runs one rollout; used once."""

    def __init__(
        self,
        settings: EpisodeSettings,
        *,
        backend: SandboxBackend,
        proxy: Proxy,
        store: CaptureStore | None,
        renderer: Renderer | None,
        root: Path,
        on_call: Callable[[CapturedCall], None] | None,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._proxy = proxy
        self._store = store
        self._root = root
        self._over = asyncio.Event()
        self._limit: Outcome | None = None
        harness = settings.harness
        self._session = Session(
            rollout_id=settings.rollout_id,
            policy=settings.policy,
            renderer=renderer,
            conversation=None if renderer is None else renderer.conversation(),
            classify=harness.classify,
            models=harness.models,
            max_calls=settings.limits.max_calls,
            max_tokens=settings.limits.max_tokens,
            on_limit=self._on_limit,
            on_call=on_call,
            on_failure=lambda outcome, detail: self._over.set(),
        )

    async def run(self) -> Rollout:
        """Run to the end; see the module's invariant."""
        record = self._record(Outcome.CANCELLED, "cancelled before it ended")
        try:
            if self._store is not None:
                self._store.begin_rollout(record)
            record = await self._run()
        except CaptureError as error:
            record = self._record(Outcome.CAPTURE_ERROR, str(error))
        except asyncio.CancelledError:
            await self._finish(replace(record, calls=await self._seal()))
            raise
        await self._finish(record)
        return record

    async def _run(self) -> Rollout:
        settings = self._settings
        sandbox: Sandbox | None = None
        try:
            try:
                sandbox = await self._create()
                ending = await self._run_harness(sandbox)
                await sandbox.kill_all()
            except (SandboxError, HarnessError) as error:
                return self._record(Outcome.SANDBOX_ERROR, str(error), calls=await self._seal())
            calls = await self._seal()
            ending = self._settle(ending, calls)
            record = self._record(ending.outcome, ending.detail, ending.process, calls)
            if ending.outcome.is_infrastructure:
                return record
            try:
                result = await score(
                    settings.task,
                    sandbox,
                    self._backend,
                    sandbox_id=f"{settings.rollout_id}-v",
                    root=self._root,
                )
            except VerifierError as error:
                return replace(record, outcome=Outcome.VERIFIER_ERROR, detail=str(error))
            except SandboxError as error:
                return replace(record, outcome=Outcome.SANDBOX_ERROR, detail=str(error))
            return replace(
                record,
                reward=result.reward,
                rewards=dict(result.rewards),
                finished_at=time.time(),
            )
        finally:
            if sandbox is not None:
                # Shielded: a second cancellation must not leave the directory behind.
                await asyncio.shield(sandbox.destroy())

    async def _create(self) -> Sandbox:
        settings = self._settings
        sandbox = await self._backend.create(
            sandbox_id=settings.rollout_id,
            root=self._root,
            proxy_url=self._proxy.url,
            proxy_socket=self._proxy.socket_path,
            mounts=tuple(Mount(source, target) for source, target in settings.harness.mounts()),
        )
        try:
            await sandbox.put_files(settings.task.files)
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    async def _run_harness(self, sandbox: Sandbox) -> _Ending:
        settings = self._settings
        key = self._proxy.register(self._session)
        try:
            plan: object = settings.harness.launch(
                settings.task.instruction,
                Endpoint(sandbox.model_url, key, self._session.models[0]),
                python=sandbox.python,
                workspace_path=sandbox.workspace_path,
                home_path=sandbox.home_path,
                max_calls=settings.limits.max_calls,
            )
        except HarnessError:
            raise
        except Exception as error:
            detail = f"the adapter's launch raised {type(error).__name__}: {error}"
            return _Ending(Outcome.START_FAILED, detail, None)
        if not isinstance(plan, LaunchPlan):
            detail = f"the adapter's launch returned {plan!r}; expected a LaunchPlan"
            return _Ending(Outcome.START_FAILED, detail, None)
        await sandbox.put_files(plan.files, area="home")
        process = await sandbox.start(
            plan.argv,
            env=plan.env,
            stdin=plan.stdin,
            limits=Limits(wall_s=settings.limits.wall_s, output_kb=OUTPUT_KB),
        )
        ended = asyncio.ensure_future(process.wait())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({ended, over}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await asyncio.wait({ended}, timeout=GRACE_S)
            if not ended.done():
                await process.kill()
            result = await ended
        finally:
            over.cancel()
            if not ended.done():
                ended.cancel()
                await sandbox.kill_all()
        return self._ending(result)

    def _ending(self, result: ProcessResult) -> _Ending:
        if self._session.failure is not None:
            outcome, detail = self._session.failure
            return _Ending(outcome, detail, result)
        if self._limit is not None:
            return _Ending(self._limit, f"the task's {self._limit.value} was reached", result)
        if result.timed_out:
            wall = self._settings.limits.wall_s
            return _Ending(Outcome.TIME_LIMIT, f"still running after {wall:g} s", result)
        if result.flooded:
            detail = f"killed after more than {OUTPUT_KB} KB of output"
            return _Ending(Outcome.HARNESS_ERROR, detail, result)
        if result.returncode != 0:
            tail = _tail(result.stderr, 500)
            detail = f"exit status {result.returncode}; stderr ends with: {tail!r}"
            return _Ending(Outcome.HARNESS_ERROR, detail, result)
        return _Ending(Outcome.COMPLETED, "", result)

    def _settle(self, ending: _Ending, calls: tuple[CapturedCall, ...]) -> _Ending:
        """A failure or start-up death that only shows once the rollout is sealed."""
        if self._session.failure is not None and not ending.outcome.is_infrastructure:
            outcome, detail = self._session.failure
            return _Ending(outcome, detail, ending.process)
        silent = not calls and ending.outcome in (Outcome.COMPLETED, Outcome.HARNESS_ERROR)
        # At the time limit a call may still wait for its reply: that harness did start.
        if silent or (ending.outcome is Outcome.TIME_LIMIT and not self._session.calls):
            detail = f"no model call came: {ending.detail or 'it ended with exit status 0'}"
            return _Ending(Outcome.START_FAILED, detail, ending.process)
        return ending

    def _on_limit(self, outcome: Outcome) -> None:
        self._limit = outcome
        self._over.set()

    async def _seal(self) -> tuple[CapturedCall, ...]:
        return await self._proxy.seal(self._settings.rollout_id, timeout=SEAL_TIMEOUT_S)

    async def _finish(self, record: Rollout) -> None:
        if self._store is not None:
            self._store.finish_rollout(record)

    def _record(
        self,
        outcome: Outcome,
        detail: str,
        process: ProcessResult | None = None,
        calls: tuple[CapturedCall, ...] = (),
    ) -> Rollout:
        settings = self._settings
        metadata: dict[str, object] = {
            **settings.task.metadata,
            "sandbox": self._backend.name,
            "harness_version": settings.harness.version() or "",
        }
        if process is not None:
            metadata["returncode"] = process.returncode
            metadata["stdout_tail"] = _tail(process.stdout, 2000)
            metadata["stderr_tail"] = _tail(process.stderr, 2000)
        return Rollout(
            rollout_id=settings.rollout_id,
            task_id=settings.task.task_id,
            harness=settings.harness.name,
            outcome=outcome,
            calls=calls,
            group_id=settings.group_id,
            seed=settings.seed,
            policy_version=settings.policy_version,
            started_at=settings.started_at,
            finished_at=time.time(),
            detail=detail,
            metadata=metadata,
        )


def _tail(data: bytes, size: int) -> str:
    return data.decode("utf-8", "replace")[-size:]
