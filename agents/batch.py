"""The batch of sequences in progress: which tokens are computed next, and what becomes of them.

Each step feeds one new token of every decoding sequence and the next stretch of every prompt that
is still being read. Keys and values of what was computed stay in a prefix cache, so that the next
turn of a conversation, and the other members of a group, read only what is new. It knows nothing of
threads, messages or training, and is used from one thread.

Invariants: keys and values of one policy version never serve another; rows are dense (row i is
``active[i]``); every request that is taken ends, with a sample, an error or a cancellation.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import torch

from agents.models.policy import CausalPolicy
from agents.prefix_cache import PrefixCache, common_prefix
from agents.row_forward import Chunk, RowForward
from agents.sampler import Drawing, draw
from clawgym_env.errors import PolicyError

_STEP_TOKENS = 2048  # most prompt tokens read a step, so that decoding sequences do not wait long
_WORTH_SHARING = 16  # prompt tokens in common that are worth waiting a step for
_CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled reply.

    Attributes:
        token_ids: What was sampled, the stop token included where one was; with a stop string,
            all tokens up to the one that completed it.
        logprobs: One a token, in nats, under the distribution it was drawn from: after penalties,
            temperature, top-k and top-p. A greedy choice is certain: 0.
        finish_reason: ``stop`` for a stop token or string, ``length`` for max_tokens or context.
        policy_version: Version of the weights that drew the first token.
        last_version: Version of the weights that drew the last one; it differs only where the
            weights changed while the sequence was held.
        prompt_tokens: Length of the prompt.
        cached_tokens: How many of the prompt's tokens were found in the prefix cache.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    last_version: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class EngineStats:
    """Running totals since the engine started; read them at any time.

    Attributes:
        requests: Requests that ended with a sample.
        sampled_tokens: Tokens sampled.
        read_tokens: Tokens computed that were not sampled just before: prompts, and sequences
            whose keys and values were computed anew.
        cached_tokens: Prompt tokens found in the prefix cache instead.
        steps: Forward passes.
        busy_s: Seconds spent in steps.
        most_active: The most sequences in one step.
    """

    requests: int = 0
    sampled_tokens: int = 0
    read_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    most_active: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A sequence on its way: the prompt, then the reply as it grows.

    Attributes:
        ids: Prompt and reply so far.
        prompt_tokens: Length of the prompt.
        drawing: Its sampling rule and generator.
        future: Where the sample or the error goes; cancelling it takes the sequence out.
        stored: How many leading ids have their keys and values in the row.
        cached: How many of the prompt's were found in the prefix cache.
        logprobs: One a sampled token.
        first_version: Version of the weights that drew the first token.
    """

    ids: list[int]
    prompt_tokens: int
    drawing: Drawing
    future: Future[Sample] = field(default_factory=Future)
    stored: int = 0
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    first_version: int = -1

    def finish(self, sample: Sample) -> None:
        """Hand over the sample, unless the request was cancelled meanwhile."""
        try:
            self.future.set_result(sample)
        except InvalidStateError:
            assert self.future.cancelled()

    def fail(self, error: PolicyError) -> None:
        """Hand over the error, unless the request was cancelled meanwhile."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            assert self.future.cancelled()


class Batch:
    """Sequences in progress over one policy.

    Args:
        policy: The policy, whose weights are read in place.
        max_batch: The most sequences in one step.
        cache_tokens: Size of the prefix cache in tokens; what 512 MiB hold if None.

    Raises:
        PolicyError: The model cannot be served; the message says why.
    """

    def __init__(self, policy: CausalPolicy, *, max_batch: int, cache_tokens: int | None) -> None:
        self.active: list[Request] = []
        self.stats = EngineStats()
        self._policy = policy
        self._max_batch = max_batch
        self._forward = RowForward(policy.base)
        if cache_tokens is None:
            cache_tokens = _CACHE_BYTES // self._forward.bytes_per_token
        self._cache = PrefixCache(cache_tokens)
        self._stop_ids = frozenset(policy.renderer.stop_ids)
        self._known = policy.renderer.vocab_size
        self._version = policy.version
        self._stale = False

    @property
    def vocab_size(self) -> int:
        """How many ids the model embeds."""
        return self._forward.vocab_size

    def invalidate(self) -> None:
        """Forget all keys and values before the next step: the weights may have changed."""
        self._stale = True

    def take(self, queue: deque[Request]) -> None:
        """Move requests from the queue into free rows, oldest first.

        A request whose prompt begins like one that is being read stays queued until that one's
        keys and values can serve it: members of a group come together.
        """
        self._renew()
        postponed: list[Request] = []
        while queue and len(self.active) < self._max_batch:
            request = queue.popleft()
            if request.future.cancelled():
                continue
            prompt = request.ids[:-1]  # the last one is computed anyway, for its logits
            segments = self._cache.match(prompt)
            cached = sum(map(len, segments))
            if any(self._will_serve(other, prompt, cached) for other in self.active):
                postponed.append(request)
                continue
            row = len(self.active)
            self.active.append(request)
            self._forward.rows.reserve(row + 1, len(request.ids))
            request.stored = request.cached = self._forward.rows.restore(row, segments)
            self.stats.cached_tokens += cached
        queue.extendleft(reversed(postponed))

    def step(self) -> None:
        """One forward pass, and one token more for each sequence whose prompt has been read."""
        before = time.perf_counter()
        self._renew()
        for row in reversed(range(len(self.active))):
            if self.active[row].future.cancelled():
                self._release(row)
        if not self.active:
            return
        chunks = self._chunks()
        # Models often embed more ids than the tokenizer has; the rest mean nothing.
        logits = self._forward(chunks)[:, : self._known]
        ready: list[int] = []
        for chunk in chunks:
            request = self.active[chunk.row]
            request.stored += len(chunk.ids)
            if request.stored < len(request.ids):
                continue
            ready.append(chunk.row)
            if not request.logprobs and request.prompt_tokens - request.cached >= _WORTH_SHARING:
                self._remember(chunk.row)
        computed = sum(len(chunk.ids) for chunk in chunks)
        self.stats.steps += 1
        self.stats.read_tokens += computed - sum(bool(r.logprobs) for r in self.active)
        self.stats.most_active = max(self.stats.most_active, len(chunks))
        if ready:
            self._draw(logits if len(ready) == len(chunks) else logits[ready], ready)
        self.stats.busy_s += time.perf_counter() - before

    def abandon(self, error: PolicyError) -> None:
        """Fail every sequence in progress."""
        for request in self.active:
            request.fail(error)
        self.active.clear()
        self._stale = True

    def _will_serve(self, other: Request, prompt: list[int], cached: int) -> bool:
        """Whether ``other``'s prompt, still being read, holds more of ``prompt`` than the cache."""
        if other.logprobs or other.prompt_tokens > self._cache.capacity:
            return False
        return common_prefix(other.ids, prompt) >= cached + _WORTH_SHARING

    def _renew(self) -> None:
        """Make sure that the keys and values are of the present weights."""
        if not self._stale and self._version == self._policy.version:
            return
        if not self._forward.shares(self._policy.base):
            self._forward = RowForward(self._policy.base)
        self._cache.clear()
        for request in self.active:
            request.stored = 0
        self._version = self._policy.version
        self._stale = False

    def _chunks(self) -> list[Chunk]:
        """The tokens to compute next; each sequence gets one at least."""
        chunks: list[Chunk] = []
        budget = _STEP_TOKENS
        for row, request in enumerate(self.active):
            stop = request.stored + max(1, budget)
            chunks.append(Chunk(row, request.stored, request.ids[request.stored : stop]))
            budget -= len(chunks[-1].ids) - 1
        return chunks

    def _draw(self, logits: torch.Tensor, rows: list[int]) -> None:
        """Draw the next token of each row, and let go of the sequences that are done."""
        tokens, logprobs = draw(logits, [self.active[row].drawing for row in rows])
        done: list[tuple[int, Literal["stop", "length"] | None]] = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            request = self.active[row]
            if not isfinite(logprob):
                done.append((row, None))
                continue
            if not request.logprobs:
                request.first_version = self._version
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.drawing.note(token)
            if reason := self._ended(request):
                done.append((row, reason))
        self.stats.sampled_tokens += len(rows)
        for row, reason in reversed(done):
            request = self.active[row]
            self._remember(row)
            self._release(row)
            if reason is None:
                request.fail(self._not_finite())
            else:
                self.stats.requests += 1
                request.finish(self._sample(request, reason))

    def _ended(self, request: Request) -> Literal["stop", "length"] | None:
        rule = request.drawing.rule
        if request.ids[-1] in self._stop_ids:
            return "stop"
        if rule.stop:
            # Every token but a special one is a byte of text or more, so a stop string that this
            # token completed begins within as many tokens as it has bytes; the rest is slack.
            reach = max(len(stop.encode()) for stop in rule.stop) + 8
            begin = max(request.prompt_tokens, len(request.ids) - reach)
            text = self._policy.renderer.decode(request.ids[begin:])
            if any(stop in text for stop in rule.stop):
                return "stop"
        return "length" if len(request.logprobs) >= rule.max_tokens else None

    def _sample(self, request: Request, reason: Literal["stop", "length"]) -> Sample:
        return Sample(
            token_ids=tuple(request.ids[request.prompt_tokens :]),
            logprobs=tuple(request.logprobs),
            finish_reason=reason,
            policy_version=request.first_version,
            last_version=self._version,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached,
        )

    def _not_finite(self) -> PolicyError:
        return PolicyError(
            f"the logits of policy version {self._version} are not finite, so nothing can be "
            f"sampled; the weights diverged: go back to an earlier checkpoint, and lower the "
            f"learning rate or clip the gradient"
        )

    def _remember(self, row: int) -> None:
        """Hold a row's keys and values for the sequences that will share its prefix."""
        request, rows = self.active[row], self._forward.rows
        self._cache.insert(
            request.ids[: request.stored], lambda start, stop: rows.extract(row, start, stop)
        )

    def _release(self, row: int) -> None:
        """Take a row out; the last one moves into its place, so that rows stay dense."""
        last = self.active.pop()
        if row < len(self.active):
            self._forward.rows.move(len(self.active), row, last.stored)
            self.active[row] = last


def wrapped(error: Exception) -> PolicyError:
    """The error as one of ours, with the original as its cause."""
    if isinstance(error, PolicyError):
        return error
    ours = PolicyError(f"the engine's step failed: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
