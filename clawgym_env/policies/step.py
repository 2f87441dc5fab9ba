"""The policy whose replies come from outside, one step at a time: the other half of ``env.step``.

It knows nothing of environments or of what the replies mean. Invariant: every request that
:meth:`StepPolicy.next_request` hands out is answered at most once, and a request whose harness has
hung up is neither handed out nor answered.

Everything here belongs to one event loop; a caller in another thread goes through
``asyncio.run_coroutine_threadsafe`` or ``loop.call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
from collections import deque

from clawgym_env.calls import PolicyRequest, Reply
from clawgym_env.errors import PolicyError


class StepPolicy:
    """A queue of requests that wait for :meth:`answer`, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[PolicyRequest, asyncio.Future[Reply]]] = {}
        self._unseen: deque[str] = deque()
        self._arrived = asyncio.Condition()
        self._closed = False

    @property
    def pending(self) -> tuple[PolicyRequest, ...]:
        """The requests without an answer, in arrival order, handed out or not."""
        return tuple(request for request, _ in self._waiting.values())

    async def complete(self, request: PolicyRequest) -> Reply:
        """Wait until :meth:`answer` or :meth:`fail` is called for this call.

        Raises:
            PolicyError: :meth:`fail` was called for it, or the policy is closed.
        """
        if self._closed:
            raise PolicyError("the step policy is closed; it answers no further calls")
        call_id = request.call.call_id
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = (request, answer)
        self._unseen.append(call_id)
        try:
            async with self._arrived:
                self._arrived.notify_all()
            return await answer
        finally:
            del self._waiting[call_id]

    async def next_request(self) -> PolicyRequest:
        """The oldest request that was not handed out yet; waits until there is one.

        Raises:
            PolicyError: The policy was closed.
        """
        async with self._arrived:
            while True:
                if self._closed:
                    raise PolicyError("the step policy is closed; there are no further requests")
                while self._unseen:
                    found = self._waiting.get(self._unseen.popleft())
                    if found is not None:
                        return found[0]
                await self._arrived.wait()

    def answer(self, call_id: str, reply: Reply) -> bool:
        """Answer a call.

        Returns:
            False where nobody waits for this call any more: it was answered, or its harness hung
            up. The reply then reached no one.
        """
        found = self._waiting.get(call_id)
        if found is None or found[1].done():
            return False
        found[1].set_result(reply)
        return True

    def fail(self, call_id: str, why: str) -> bool:
        """Make a call end in a :class:`~clawgym_env.errors.PolicyError`; returns as `answer`."""
        found = self._waiting.get(call_id)
        if found is None or found[1].done():
            return False
        found[1].set_exception(PolicyError(why))
        return True

    async def close(self) -> None:
        """Fail what waits and refuse what comes; calling it again does nothing."""
        self._closed = True
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(PolicyError("the step policy was closed before an answer"))
        async with self._arrived:
            self._arrived.notify_all()
