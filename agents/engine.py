"""The embedded engine: token ids in, sampled ids with logprobs out, many requests at once.

It owns the thread that runs the model, and the ways in: a request joins the batch at the next step
whenever it comes and leaves when it is done. What happens inside a step is ``batch.py``'s. It knows
nothing of messages, harnesses or training. Invariants: no step runs inside a pause; every request
ends, with a sample, an error or a cancellation, even when a step fails or the engine is closed.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch

from agents.batch import Batch, EngineStats, Request, Sample, wrapped
from agents.models.policy import CausalPolicy
from agents.sampler import Drawing, Rule
from clawgym_env.calls import Sampling
from clawgym_env.errors import ConfigError, PolicyError

__all__ = ["Engine", "EngineStats", "Pause", "Sample"]

_SMALL = 20_000_000


class Engine:
    """Samples from a policy; it may be used from any thread and any event loop.

    Args:
        policy: The policy, whose weights are read in place.
        max_batch: The most sequences in one step; others wait. Their keys and values take memory
            for this many of the longest sequence so far.
        default: Sampling parameters where a request leaves them open; where both do, the model's
            own distribution up to the end of the context.
        max_context: The most tokens, prompt and reply together; the model's own limit if None.
        cache_tokens: Size of the prefix cache in tokens; what 512 MiB hold if None, 0 for none.
        threads: CPU threads of a forward pass; if None, 1 for models below 20 million parameters
            (more threads gain them little and starve the sandboxes), else torch's default.
        seed: Seed for requests that bring none: in order of arrival, so reproducible only as far
            as that order is.

    Raises:
        ConfigError: A setting is out of range.
        PolicyError: The model cannot be served; the message says why.
    """

    def __init__(
        self,
        policy: CausalPolicy,
        *,
        max_batch: int = 32,
        default: Sampling | None = None,
        max_context: int | None = None,
        cache_tokens: int | None = None,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        context = policy.context_length if max_context is None else max_context
        for name, value, least in (
            ("max_batch", max_batch, 1),
            ("max_context", context, 2),
            ("threads", threads, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"the engine's {name} is {least} or more; got {value}")
        if threads is None and policy.parameter_counts()[1] < _SMALL:
            threads = 1
        self.policy = policy
        self.max_context = context
        self._default = default or Sampling()
        self._seeds = random.Random(seed)
        self._batch = Batch(policy, max_batch=max_batch, cache_tokens=cache_tokens)
        self._queue: deque[Request] = deque()  # the worker's alone
        self._changed = threading.Condition()  # guards what follows
        self._arrived: list[Request] = []
        self._pause: Pause | None = None
        self._parked = False
        self._closing = False
        self._one_pause = threading.Lock()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(threads, ready), name="clawgym-engine", daemon=True
        )
        usual = torch.get_num_threads()
        self._thread.start()
        ready.wait()
        # torch keeps the setting a thread, but threads to come would inherit the engine's.
        torch.set_num_threads(usual)

    @property
    def stats(self) -> EngineStats:
        """Running totals."""
        return self._batch.stats

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> Future[Sample]:
        """Queue a request; cancelling the future takes it out of the batch at the next step.

        Args:
            prompt_ids: The prompt's ids, at least one.
            sampling: Parameters; what they leave open is the engine's default.

        Raises:
            PolicyError: The prompt is empty, has ids outside the vocabulary or fills the context,
                a parameter is out of range, or the engine is closed.
        """
        ids = list(prompt_ids)
        room = self._room(ids)
        with self._changed:
            if self._closing:
                raise PolicyError("the engine is closed; make a new one")
            seed = self._seeds.getrandbits(63)
            rule = Rule.resolve(sampling or Sampling(), self._default, room=room, seed=seed)
            request = Request(ids, len(ids), Drawing(rule))
            self._arrived.append(request)
            self._changed.notify_all()
        return request.future

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> Sample:
        """Sample a reply; cancelling the awaiting task cancels the request.

        Raises:
            PolicyError: As ``submit``, or the forward pass failed.
        """
        return await asyncio.wrap_future(self.submit(prompt_ids, sampling))

    def paused(self, *, drain: bool = True) -> Pause:
        """A context, plain or async, in which no step runs and the weights may change.

        The prefix cache is dropped on leaving it. A second pause waits for the first to end.

        Args:
            drain: Finish the sequences in progress first, so that each sample is of one version;
                False holds them where they are, and they go on under the new weights with their
                keys and values computed anew.
        """
        return Pause(self, drain)

    def close(self) -> None:
        """Stop the thread and fail what is in progress; idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _room(self, ids: list[int]) -> int:
        """How many tokens the context has left after a prompt."""
        if not ids:
            raise PolicyError("the prompt is empty; the engine needs a token to go on from")
        size = self._batch.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            raise PolicyError(
                f"the prompt has id {next(i for i in ids if not 0 <= i < size)}, but the model's "
                f"ids are 0 to {size - 1}; was it rendered with another tokenizer?"
            )
        if len(ids) >= self.max_context:
            raise PolicyError(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_context}, one "
                f"of which is left for the reply; shorten the conversation or raise max_context"
            )
        return self.max_context - len(ids)

    @torch.inference_mode()
    def _work(self, threads: int | None, ready: threading.Event) -> None:
        """The thread: steps while there is work, sleep while there is none."""
        if threads is not None:
            torch.set_num_threads(threads)
        ready.set()
        while self._wait_for_work():
            try:
                if self._pause is None:
                    self._batch.take(self._queue)
                self._batch.step()
            except Exception as error:  # the sequences get it; the engine serves the next ones
                self._batch.abandon(wrapped(error))
        closed = PolicyError("the engine was closed before the reply was complete")
        self._batch.abandon(closed)
        _fail((*self._queue, *self._arrived), closed)

    def _wait_for_work(self) -> bool:
        """Sleep until a step is due; False once the engine is closing."""
        with self._changed:
            while not self._closing:
                self._queue.extend(self._arrived)
                self._arrived.clear()
                if self._pause is None:
                    self._parked = False
                    if self._batch.active or self._queue:
                        return True
                elif self._pause.drain and self._batch.active:
                    return True
                else:
                    self._parked = True
                    self._changed.notify_all()
                self._changed.wait()
        return False

    def _enter_pause(self, pause: Pause) -> None:
        self._one_pause.acquire()
        with self._changed:
            self._pause = pause
            self._parked = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._parked or self._closing)
            if self._closing:
                self._pause = None
                self._one_pause.release()
                raise PolicyError("the engine is closed; there is nothing to pause")

    def _leave_pause(self) -> None:
        with self._changed:
            self._batch.invalidate()
            self._pause = None
            self._changed.notify_all()
        self._one_pause.release()


class Pause:
    """A stretch in which the engine runs no step; made by ``Engine.paused``.

    Raises:
        PolicyError: On entering, the engine is closed; on leaving, the weights changed but the
            policy's version did not, so samples before and after could not be told apart.
    """

    def __init__(self, engine: Engine, drain: bool) -> None:
        self.drain = drain
        self._engine = engine
        self._before = (0, 0)

    def __enter__(self) -> Pause:
        self._engine._enter_pause(self)
        self._before = self._state()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        before, after = self._before, self._state()
        self._engine._leave_pause()
        if kind is None and before[0] == after[0] and before[1] != after[1]:
            raise PolicyError(
                f"the weights changed inside a pause, but the policy's version is still "
                f"{after[0]}; call policy.updated() after each optimiser step"
            )

    async def __aenter__(self) -> Pause:
        entering = asyncio.ensure_future(asyncio.to_thread(self.__enter__))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            # The thread may still get the pause; it must not keep it.
            entering.add_done_callback(self._give_back)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.__exit__(kind, *rest)

    def _give_back(self, entering: asyncio.Future[Pause]) -> None:
        if not entering.cancelled() and entering.exception() is None:
            self._engine._leave_pause()

    def _state(self) -> tuple[int, int]:
        """The policy's version and how often its weights were written to, as torch counts it."""
        policy = self._engine.policy
        return policy.version, sum(parameter._version for parameter in policy.model.parameters())


def _fail(requests: Iterable[Request], error: PolicyError) -> None:
    for request in requests:
        request.fail(error)
