"""What a policy backend is: something that answers one model call at a time.

It knows the canonical records and nothing of HTTP, sessions, rendering or storage. Whoever calls a
backend keeps this invariant: a call is put to it exactly once, and is cancelled when the program
that asked has hung up.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from clawgym_env.calls import PolicyRequest, Reply


@runtime_checkable
class Policy(Protocol):
    """Answers model calls; many may be in flight at once, of one rollout or of several."""

    async def complete(self, request: PolicyRequest) -> Reply:
        """Answer one call.

        Args:
            request: The call, and its prompt ids where the rollout has a renderer.

        Returns:
            The reply, as token ids, as text or as a message.

        Raises:
            PolicyError: The backend could not answer: an infrastructure failure.
            ProtocolError: The harness shall see this API error, as a model server would send it
                (a prompt that is too long, say); it is no infrastructure failure.
            asyncio.CancelledError: The harness hung up; the backend frees what the call held.
        """
        ...


@runtime_checkable
class Closable(Protocol):
    """A policy that holds something to let go of, such as connections."""

    async def close(self) -> None:
        """Let go of everything; calling it again does nothing."""
        ...
