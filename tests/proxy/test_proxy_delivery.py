"""Harnesses that hang up: what the policy notices and what is captured."""

import asyncio
import contextlib
import socket
import struct
from pathlib import Path

import httpx
import pytest
from proxy_cases import Served, chat, connect, echo, hang_up, raw_request, serving

from clawgym_env.calls import Message, Outcome, PolicyRequest, Reply
from clawgym_env.errors import CaptureError
from clawgym_env.policies import FunctionPolicy, ScriptedPolicy, StepPolicy
from clawgym_env.store import CaptureStore

pytestmark = pytest.mark.anyio

LARGE = "x" * 4_000_000
"""More than a Unix socket's buffers hold, so that a reply cannot be out before it is read."""


async def test_a_harness_that_hangs_up_cancels_the_policy(store: CaptureStore) -> None:
    policy = StepPolicy()
    async with serving(policy, store=store) as served:
        for stream in (False, True):
            _, writer = await connect(served)
            writer.write(raw_request(served.key, chat(stream=stream)))
            request = await policy.next_request()
            await hang_up(writer)
            await served.until(lambda: not policy.pending)
            await served.until(lambda: served.session.in_flight == 0)
            assert not policy.answer(request.call.call_id, Reply(text="too late"))
        assert served.session.abandoned == 2
        assert await served.proxy.seal("rollout-1") == ()
    assert store.rollout("rollout-1").calls == ()
    assert served.session.failure is None


async def test_a_dropped_stream_that_was_kept_alive_cancels_the_policy() -> None:
    policy = StepPolicy()
    async with serving(policy, keepalive_s=0.01) as served:
        reader, writer = await connect(served)
        writer.write(raw_request(served.key, chat(stream=True)))
        await policy.next_request()
        await reader.readuntil(b": keep-alive")
        await hang_up(writer)
        await served.until(lambda: not policy.pending)


async def test_a_reply_that_comes_as_the_harness_hangs_up_is_undelivered(
    store: CaptureStore,
) -> None:
    """The hang-up comes after the policy was asked and is not seen before the commit."""
    writers: list[asyncio.StreamWriter] = []

    def hang_up_and_answer(request: PolicyRequest) -> Reply:
        # Closed beneath the event loop: by the time of the commit the server's loop had no turn
        # in which it could have read the end of the stream.
        sock = writers[-1].get_extra_info("socket")
        sock.shutdown(socket.SHUT_RDWR)
        return echo(request)

    async with serving(FunctionPolicy(hang_up_and_answer), store=store) as served:
        for stream in (False, True):
            _, writer = await connect(served)
            writers.append(writer)
            writer.write(raw_request(served.key, chat(stream=stream)))
            await served.until_settled(len(writers))
            await hang_up(writer)
        calls = await served.proxy.seal("rollout-1")
    assert [c.delivered for c in calls] == [False, False]
    assert [c.completion.message.text for c in calls] == ["rollout-1: hello"] * 2
    assert store.rollout("rollout-1").calls == calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_is_cut_in_the_middle_is_undelivered(
    tmp_path: Path, store: CaptureStore, stream: bool
) -> None:
    policy = ScriptedPolicy([Message("assistant", LARGE), Message("assistant", LARGE)])
    async with serving(policy, store=store, socket_path=tmp_path / "proxy.sock") as served:
        reader, writer = await connect(served)
        writer.write(raw_request(served.key, chat(stream=stream)))
        await reader.readexactly(100_000)
        assert served.settled == []
        assert [c.delivered for c in store.rollout("rollout-1").calls] == [None]
        await hang_up(writer)
        (cut,) = await served.until_settled(1)
        assert cut.delivered is False

        reader, writer = await connect(served, limit=2 * len(LARGE))
        writer.write(raw_request(served.key, chat(stream=stream)))
        await reader.readuntil(b"data: [DONE]" if stream else b'"total_tokens":0}}')
        await served.until_settled(2)
        await hang_up(writer)
        calls = await served.proxy.seal("rollout-1")
    assert [c.delivered for c in calls] == [False, True]
    assert store.rollout("rollout-1").calls == calls


@pytest.mark.parametrize("size", range(100_000, 400_000, 25_000))
async def test_delivered_means_that_the_operating_system_has_every_byte(
    tmp_path: Path, size: int
) -> None:
    """Around the size of the socket's buffer, where the rest of a reply is small or nothing."""
    policy = ScriptedPolicy([Message("assistant", "x" * size)])
    async with serving(policy, socket_path=tmp_path / "proxy.sock") as served:
        with socket.socket(socket.AF_UNIX) as harness:
            harness.connect(str(served.proxy.socket_path))
            harness.sendall(raw_request(served.key, chat()))
            await served.until(lambda: bool(served.session.captured))
            for _ in range(50):
                await asyncio.sleep(0)
            whole = bool(served.settled)
            if whole:
                # The loop has no turn while this reads, so nothing can follow what is out.
                harness.setblocking(False)
                received = bytearray()
                with contextlib.suppress(BlockingIOError):
                    while piece := harness.recv(1 << 20):
                        received += piece
                assert received.endswith(b'"total_tokens":0}}')
        (captured,) = await served.until_settled(1)
    assert captured.delivered is whole


async def test_a_reset_connection_is_noticed(store: CaptureStore) -> None:
    policy = StepPolicy()
    async with serving(policy, store=store) as served:
        _, writer = await connect(served)
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.write(raw_request(served.key, chat()))
        await policy.next_request()
        writer.transport.abort()
        await served.until(lambda: not policy.pending)


async def test_one_connection_carries_many_calls_and_may_close_after_the_last(
    store: CaptureStore,
) -> None:
    async with serving(FunctionPolicy(echo), store=store) as served:
        reader, writer = await connect(served)
        for index in range(20):
            writer.write(raw_request(served.key, chat(str(index), stream=True)))
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await hang_up(writer)
        request = raw_request(served.key, chat("last"))
        reader, writer = await connect(served)
        writer.write(request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        assert b"rollout-1: last" in await reader.read()
        await hang_up(writer)
        calls = await served.proxy.seal("rollout-1")
    assert [c.call.index for c in calls] == list(range(21))
    assert all(c.delivered for c in calls)


async def test_pipelined_requests_are_answered_in_order(store: CaptureStore) -> None:
    async with serving(FunctionPolicy(echo), store=store) as served:
        reader, writer = await connect(served)
        writer.write(b"".join(raw_request(served.key, chat(f"no {i}")) for i in range(3)))
        for index in range(3):
            await reader.readuntil(f"rollout-1: no {index}".encode())
        await hang_up(writer)
        calls = await served.proxy.seal("rollout-1")
    assert [c.delivered for c in calls] == [True, True, True]


async def test_a_store_that_fails_keeps_the_reply_back(store: CaptureStore) -> None:
    async with serving(FunctionPolicy(echo), store=store) as served:
        store.close()
        async with httpx.AsyncClient() as client:
            for stream in (False, True):
                response = await client.post(
                    f"{served.api}/chat/completions",
                    json=chat(stream=stream),
                    headers={"authorization": f"Bearer {served.key}"},
                )
                assert response.status_code == 500
                assert response.json()["error"]["code"] == "capture_error"
                assert "rollout-1: hello" not in response.text
        assert await served.proxy.seal("rollout-1") == ()
    assert served.session.failure is not None
    assert served.session.failure[0] is Outcome.CAPTURE_ERROR


async def test_a_hook_that_fails_is_a_failure_of_the_session() -> None:
    def classify(call: object) -> str:
        raise LookupError("no such prompt")

    async with serving(FunctionPolicy(echo), classify=classify) as served:
        async with httpx.AsyncClient() as client:
            response = await client.post(
                f"{served.api}/chat/completions",
                json=chat(),
                headers={"authorization": f"Bearer {served.key}"},
            )
    assert response.status_code == 500
    assert served.session.failure == (
        Outcome.CAPTURE_ERROR,
        "call 0 could not be admitted: LookupError: no such prompt",
    )


async def test_sealing_waits_for_what_is_in_flight() -> None:
    policy = StepPolicy()
    async with serving(policy) as served:
        async with httpx.AsyncClient() as client:
            post = asyncio.ensure_future(post_chat(client, served))
            request = await policy.next_request()
            sealing = asyncio.ensure_future(served.proxy.seal("rollout-1", timeout=30))
            await asyncio.sleep(0.02)
            assert not sealing.done()
            policy.answer(request.call.call_id, Reply(message=Message("assistant", "in time")))
            calls = await sealing
            assert (await post).status_code == 200
    assert [(c.completion.message.text, c.delivered) for c in calls] == [("in time", True)]


async def test_sealing_aborts_what_does_not_end(tmp_path: Path) -> None:
    policy = StepPolicy()
    async with serving(policy, socket_path=tmp_path / "proxy.sock") as served:
        async with httpx.AsyncClient() as client:
            thinking = asyncio.ensure_future(post_chat(client, served))
            await policy.next_request()
            # A second harness of the rollout does not read what it gets.
            reader, writer = await connect(served)
            writer.write(raw_request(served.key, chat()))
            request = await policy.next_request()
            policy.answer(request.call.call_id, Reply(message=Message("assistant", LARGE)))
            await reader.readexactly(1000)
            calls = await served.proxy.seal("rollout-1", timeout=0.05)
            assert (await thinking).status_code == 503
            await hang_up(writer)
    assert policy.pending == ()
    assert [(c.call.index, c.delivered) for c in calls] == [(1, False)]


async def test_a_policy_that_ignores_cancellation_is_waited_for_in_vain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = asyncio.Event()

    async def stubborn(request: object) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "too late"

    async with serving(FunctionPolicy(stubborn)) as served:
        _, writer = await connect(served)
        writer.write(raw_request(served.key, chat()))
        await served.until(lambda: served.session.in_flight == 1)
        await hang_up(writer)
        assert await served.proxy.seal("rollout-1", timeout=10) == ()
        release.set()
        await asyncio.sleep(0)
    assert any("must let asyncio.CancelledError pass" in r.message for r in caplog.records)


async def test_a_reply_made_on_cancellation_is_kept_as_undelivered(store: CaptureStore) -> None:
    async def partial(request: object) -> Message:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Message("assistant", "as far as I came")
        raise AssertionError

    async with serving(FunctionPolicy(partial), store=store) as served:
        _, writer = await connect(served)
        writer.write(raw_request(served.key, chat()))
        await served.until(lambda: served.session.in_flight == 1)
        await hang_up(writer)
        calls = await served.proxy.seal("rollout-1")
    assert [(c.completion.message.text, c.delivered) for c in calls] == [
        ("as far as I came", False)
    ]


async def post_chat(client: httpx.AsyncClient, served: Served) -> httpx.Response:
    return await client.post(
        f"{served.api}/chat/completions",
        json=chat(),
        headers={"authorization": f"Bearer {served.key}"},
        timeout=60,
    )


async def test_a_closed_store_after_the_reply_is_a_failure(store: CaptureStore) -> None:
    """The commit worked, the mark does not: the call stays, the session says what happened."""

    def close_store(call: object) -> None:
        raise CaptureError("the disk is gone")

    async with serving(FunctionPolicy(echo), store=store) as served:
        served.session.on_call = close_store
        async with httpx.AsyncClient() as client:
            assert (await post_chat(client, served)).status_code == 200
        calls = await served.proxy.seal("rollout-1")
    assert [c.delivered for c in calls] == [True]
    assert served.session.failure == (Outcome.CAPTURE_ERROR, "CaptureError: the disk is gone")
