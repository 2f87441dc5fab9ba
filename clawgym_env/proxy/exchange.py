"""One admitted call from the policy's answer to the last byte.

It knows a session, a wire protocol, the store and a connection, and nothing of routes or keys.
Invariants: a reply is committed to the store before any part of it leaves; a call whose harness
has hung up stops costing the policy at once; every committed call ends up delivered or undelivered,
and only a harness that was still connected for the last byte makes it delivered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Send

from clawgym_env.calls import CapturedCall, Completion, Outcome, Reply
from clawgym_env.errors import CaptureError, PolicyError, ProtocolError, RenderError
from clawgym_env.protocols import WireProtocol
from clawgym_env.proxy.completions import to_completion
from clawgym_env.proxy.connection import ClientGoneError, Connection
from clawgym_env.proxy.replies import send_error, send_event, start_stream, start_whole
from clawgym_env.proxy.session import AdmittedCall, Session

if TYPE_CHECKING:
    from clawgym_env.store import CaptureStore

log = logging.getLogger(__name__)

_CANCEL_S = 1.0
"""Seconds that a policy has to end after it was cancelled."""


class Exchange:
    """Answers one call.

    Args:
        session: The rollout.
        admitted: The call and its prompt.
        wire: The protocol it came in.
        store: Where the reply is committed; None keeps it in memory alone.
        connection: The connection it came over.
        receive: The ASGI channel, its body read.
        send: The ASGI channel.
        keepalive_s: Seconds between the comments that keep a stream open while the policy thinks.
    """

    def __init__(
        self,
        session: Session,
        admitted: AdmittedCall,
        wire: WireProtocol,
        store: CaptureStore | None,
        connection: Connection,
        receive: Receive,
        send: Send,
        keepalive_s: float,
    ) -> None:
        self._session = session
        self._admitted = admitted
        self._call = admitted.call
        self._wire = wire
        self._store = store
        self._connection = connection
        self._receive = receive
        self._send = send
        self._keepalive_s = keepalive_s if admitted.call.stream else None
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streaming = False
        self._sending = False

    async def run(self) -> None:
        """Answer the call; returns when it is known whether the reply was delivered."""
        with self._session.flying(self._call.call_id, self.abort):
            try:
                completion = await self._ask()
                payload = self._payload(completion)
                captured = self._commit(completion)
            except ClientGoneError:
                self._session.abandoned += 1
                return
            except ProtocolError as exc:
                await self._refuse(exc)
                return
            except Exception as exc:
                # A defect of ours or of the session's hooks: the harness still gets an answer.
                log.exception("call %s could not be captured", self._call.call_id)
                await self._refuse(self._failed(Outcome.CAPTURE_ERROR, _clause(exc)))
                return
            delivered = False
            try:
                delivered = await self._deliver(payload)
                if not delivered:
                    await self._connection.dropped()
            finally:
                self._settle(dataclasses.replace(captured, delivered=delivered))

    def abort(self) -> None:
        """Stop thinking or sending; the harness gets an error, or its connection is dropped."""
        if not self._aborted.done():
            self._aborted.set_result(None)
        if self._sending:
            self._connection.abort()

    async def _ask(self) -> Completion:
        started_at = time.time()
        try:
            reply = await self._reply()
            return to_completion(
                reply,
                self._admitted.request,
                self._session.renderer,
                started_at=started_at,
                finished_at=time.time(),
            )
        except (ProtocolError, ClientGoneError):
            raise
        except (PolicyError, RenderError) as exc:
            raise self._failed(Outcome.POLICY_ERROR, str(exc)) from exc
        except Exception as exc:
            # Whatever a policy of the user's raises must end this call and not the server.
            log.exception("the policy failed on call %s", self._call.call_id)
            raise self._failed(Outcome.POLICY_ERROR, _clause(exc)) from exc

    async def _reply(self) -> Reply:
        """The policy's answer; cancels it as soon as nobody waits for it."""
        answer = asyncio.ensure_future(self._session.policy.complete(self._admitted.request))
        gone: asyncio.Future[None] = asyncio.ensure_future(self._until_gone())
        changes: set[asyncio.Future[Any]] = {answer, gone, self._aborted}
        try:
            while not answer.done():
                await asyncio.wait(
                    changes, timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED
                )
                if answer.done():
                    break
                if gone.done() or self._aborted.done():
                    await _cancel(answer, self._call.call_id)
                    if _has_result(answer):
                        break
                    if gone.done():
                        raise ClientGoneError
                    raise _ended()
                await self._send_keepalive()
            if answer.cancelled():
                raise PolicyError("the policy cancelled the call by itself")
            return answer.result()
        finally:
            gone.cancel()
            answer.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _send_keepalive(self) -> None:
        self._sending = True
        if not self._streaming:
            self._streaming = True
            await start_stream(self._send, self._call.call_id)
        await send_event(self._send, self._wire.keepalive())
        self._sending = False

    def _payload(self, completion: Completion) -> Sequence[bytes]:
        """Every byte of the reply, in the pieces in which it is sent."""
        call, prompt = self._call, self._admitted.prompt
        prompt_tokens = 0 if prompt is None else len(prompt.ids)
        texts = None
        renderer = self._session.renderer
        if call.sampling.logprobs and renderer is not None and completion.token_ids is not None:
            texts = [renderer.decode((token_id,)) for token_id in completion.token_ids]
        write = self._wire.stream if call.stream else self._wire.render
        try:
            body = write(call, completion, prompt_tokens=prompt_tokens, token_texts=texts)
        except PolicyError as exc:
            raise self._failed(Outcome.POLICY_ERROR, str(exc)) from exc
        return (body,) if isinstance(body, bytes) else tuple(body)

    def _commit(self, completion: Completion) -> CapturedCall:
        session, call, prompt = self._session, self._call, self._admitted.prompt
        captured = CapturedCall(call=call, completion=completion)
        if prompt is not None:
            captured = dataclasses.replace(
                captured,
                prompt_ids=prompt.ids,
                parent_id=prompt.parent_id,
                extends=prompt.extends,
                drift=prompt.drift,
            )
        if self._store is not None:
            try:
                self._store.commit_call(captured)
            except CaptureError as exc:
                raise self._failed(Outcome.CAPTURE_ERROR, str(exc)) from exc
        session.keep(captured)
        if session.conversation is not None and prompt is not None:
            assert completion.token_ids is not None
            session.conversation.record(
                call.call_id, prompt.ids, completion.token_ids, completion.message
            )
        return captured

    async def _deliver(self, payload: Sequence[bytes]) -> bool:
        if self._connection.gone():
            return False
        self._sending = True
        *head, last = payload
        if not self._call.stream:
            await start_whole(self._send, self._call.call_id, len(last))
        elif not self._streaming:
            self._streaming = True
            await start_stream(self._send, self._call.call_id)
        for event in head:
            if self._connection.gone():
                return False
            await send_event(self._send, event)
        await self._connection.drain()
        if self._connection.gone():
            return False
        await send_event(self._send, last, more=False)
        return await self._connection.delivered()

    def _settle(self, captured: CapturedCall) -> None:
        try:
            if self._store is not None:
                self._store.mark_delivered(captured.call.call_id, bool(captured.delivered))
            self._session.settle(captured)
        except Exception as exc:
            # The reply is out, so the session's record is the only place to tell of it.
            log.exception("call %s could not be marked as delivered", captured.call.call_id)
            self._session.fail(Outcome.CAPTURE_ERROR, _clause(exc))

    async def _refuse(self, exc: ProtocolError) -> None:
        self._sending = True
        if self._streaming:
            await send_event(self._send, self._wire.stream_error(exc), more=False)
        else:
            await send_error(self._send, self._wire, exc)

    def _failed(self, outcome: Outcome, detail: str) -> ProtocolError:
        self._session.fail(outcome, detail)
        return ProtocolError(500, detail, code=outcome.value, kind="server_error")


async def _cancel(answer: asyncio.Future[Reply], call_id: str) -> None:
    answer.cancel()
    await asyncio.wait({answer}, timeout=_CANCEL_S)
    if not answer.done():
        log.error(
            "the policy went on for more than %s s after call %s was cancelled; it must let "
            "asyncio.CancelledError pass",
            _CANCEL_S,
            call_id,
        )


def _clause(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _has_result(answer: asyncio.Future[Reply]) -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None


def _ended() -> ProtocolError:
    return ProtocolError(
        503, "the rollout ended while this call waited", code="rollout_ended", kind="server_error"
    )
