"""One rollout at the model boundary: who answers it, what it may ask for, what was captured.

It knows the canonical records and nothing of HTTP, keys or the store. Invariants: indices follow
arrival and have no gaps; ``on_limit`` and ``on_failure`` are called at most once each; ``failure``
keeps the first failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clawgym_env.calls import CallKind, CapturedCall, ModelCall, Outcome, PolicyRequest
from clawgym_env.errors import ConfigError, ProtocolError, near
from clawgym_env.policies import Policy

if TYPE_CHECKING:
    from clawgym_env.rendering import Conversation, RenderedPrompt, Renderer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call that will be answered, and its prompt as rendered when it arrived."""

    call: ModelCall
    prompt: RenderedPrompt | None = None

    @property
    def request(self) -> PolicyRequest:
        """What the policy is asked."""
        return PolicyRequest(self.call, None if self.prompt is None else self.prompt.ids)


@dataclass(eq=False)
class Session:
    """A rollout's side of the proxy.

    Attributes:
        rollout_id: Unique over all rollouts.
        policy: Answers the calls.
        conversation: Renders prompts and splices sampled turns; made from the renderer where it
            is None. Not to be shared between sessions.
        renderer: Gives and reads token ids; None captures messages alone.
        classify: Tells main calls from auxiliary ones; None takes all for main.
        models: Model names that are served; ``"*"`` serves any.
        max_calls: Calls that are answered, auxiliary ones included; None sets no limit.
        max_tokens: Sampled tokens after which no further call is answered; None sets no limit.
            Counts what a renderer gave ids for.
        on_limit: Called once, when a call is refused because a limit is reached.
        on_call: Called for each captured call once its delivery is known.
        on_failure: Called once, with the first failure.
        retain: Whether captured calls are kept in memory until the seal; False suits a session
            that runs for days and has a store.
        calls: Calls admitted so far.
        sampled_tokens: Reply tokens captured so far.
        abandoned: Admitted calls whose harness hung up before there was a reply.
        limit: The limit that was reached, if one was.
        failure: The first failure of the infrastructure and one clause on it.
        sealed: Whether calls are refused because the rollout is over.
    """

    rollout_id: str
    policy: Policy
    conversation: Conversation | None = None
    renderer: Renderer | None = None
    classify: Callable[[ModelCall], CallKind] | None = None
    models: tuple[str, ...] = ("clawgym",)
    max_calls: int | None = None
    max_tokens: int | None = None
    on_limit: Callable[[Outcome], None] | None = None
    on_call: Callable[[CapturedCall], None] | None = None
    on_failure: Callable[[Outcome, str], None] | None = None
    retain: bool = True
    calls: int = field(default=0, init=False)
    sampled_tokens: int = field(default=0, init=False)
    abandoned: int = field(default=0, init=False)
    limit: Outcome | None = field(default=None, init=False)
    failure: tuple[Outcome, str] | None = field(default=None, init=False)
    sealed: bool = field(default=False, init=False)
    _captured: dict[int, CapturedCall] = field(default_factory=dict, init=False, repr=False)
    _aborts: dict[str, Callable[[], None]] = field(default_factory=dict, init=False, repr=False)
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.conversation is not None and self.renderer is None:
            raise ConfigError(
                f"session {self.rollout_id!r} has a conversation but no renderer; "
                "give the renderer that made the conversation"
            )
        if self.renderer is not None and self.conversation is None:
            self.conversation = self.renderer.conversation()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Admitted calls whose delivery is not yet known."""
        return len(self._aborts)

    @property
    def captured(self) -> tuple[CapturedCall, ...]:
        """The calls captured so far, in arrival order; empty where they are not retained."""
        return tuple(self._captured[index] for index in sorted(self._captured))

    def admit(self, call: ModelCall) -> AdmittedCall:
        """Check a call, give it its kind, render its prompt and count it.

        Args:
            call: The call as parsed, its index being :attr:`calls`.

        Raises:
            ProtocolError: The model is unknown (404) or a limit is reached (429).
            RenderError: The chat template refused the conversation.
        """
        if "*" not in self.models and call.model not in self.models:
            raise ProtocolError(
                404,
                f"the model {call.model!r} does not exist{near(call.model, self.models)}",
                param="model",
                code="model_not_found",
            )
        self._check_limits()
        if self.classify is not None:
            call = dataclasses.replace(call, kind=self.classify(call))
        prompt = None
        if self.conversation is not None:
            prompt = self.conversation.render(call.messages, call.tools)
        self.calls += 1
        return AdmittedCall(call, prompt)

    @contextlib.contextmanager
    def flying(self, call_id: str, abort: Callable[[], None]) -> Iterator[None]:
        """Count a call as in flight; ``abort`` makes it end soon."""
        self._aborts[call_id] = abort
        self._idle.clear()
        try:
            yield
        finally:
            del self._aborts[call_id]
            if not self._aborts:
                self._idle.set()

    def keep(self, captured: CapturedCall) -> None:
        """Hold a committed call whose delivery is not yet known."""
        self.sampled_tokens += len(captured.completion.token_ids or ())
        if self.retain:
            self._captured[captured.call.index] = captured

    def settle(self, captured: CapturedCall) -> None:
        """Hold a call whose delivery is known now, and tell ``on_call``."""
        if self.retain:
            self._captured[captured.call.index] = captured
        if self.on_call is not None:
            self.on_call(captured)

    def fail(self, outcome: Outcome, detail: str) -> None:
        """Record a failure of the infrastructure; only the first is kept."""
        log.warning("rollout %s: %s: %s", self.rollout_id, outcome.value, detail)
        if self.failure is None:
            self.failure = (outcome, detail)
            if self.on_failure is not None:
                self.on_failure(outcome, detail)

    async def settled(self, timeout: float | None) -> bool:
        """Wait until nothing is in flight; False where ``timeout`` seconds passed before."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """Make every call in flight end soon, as undelivered where it has a reply."""
        for abort in list(self._aborts.values()):
            abort()

    def _check_limits(self) -> None:
        if self.max_calls is not None and self.calls >= self.max_calls:
            self._refuse(Outcome.CALL_LIMIT, f"{self.max_calls} model calls")
        if self.max_tokens is not None and self.sampled_tokens >= self.max_tokens:
            self._refuse(Outcome.TOKEN_LIMIT, f"{self.max_tokens} sampled tokens")

    def _refuse(self, limit: Outcome, what: str) -> None:
        if self.limit is None:
            self.limit = limit
            if self.on_limit is not None:
                self.on_limit(limit)
        raise ProtocolError(
            429,
            f"this rollout's limit of {what} is reached; no further call is answered",
            code="rollout_limit",
            kind="rollout_limit",
        )
