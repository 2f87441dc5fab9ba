import asyncio

import pytest

from clawgym_env.calls import Message, ModelCall, PolicyRequest, Reply
from clawgym_env.errors import PolicyError
from clawgym_env.policies import Closable, Policy, StepPolicy

pytestmark = pytest.mark.anyio


def request(call_id: str, index: int = 0) -> PolicyRequest:
    message = Message("user", f"question {index}")
    return PolicyRequest(ModelCall(call_id, "r", index, "openai_chat", "clawgym", (message,)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_is_a_policy() -> None:
    assert isinstance(StepPolicy(), Policy)
    assert isinstance(StepPolicy(), Closable)


async def test_requests_come_oldest_first_and_get_their_own_answers() -> None:
    policy = StepPolicy()
    calls = [asyncio.ensure_future(policy.complete(request(f"c{i}", i))) for i in range(3)]
    await settle()
    assert [r.call.call_id for r in policy.pending] == ["c0", "c1", "c2"]
    handed_out = [(await policy.next_request()).call.call_id for _ in range(3)]
    assert handed_out == ["c0", "c1", "c2"]
    for call_id in ("c2", "c0", "c1"):
        assert policy.answer(call_id, Reply(text=f"to {call_id}"))
    assert [(await call).text for call in calls] == ["to c0", "to c1", "to c2"]
    assert policy.pending == ()


async def test_next_request_waits_for_one() -> None:
    policy = StepPolicy()
    waiting = asyncio.ensure_future(policy.next_request())
    await settle()
    assert not waiting.done()
    call = asyncio.ensure_future(policy.complete(request("c")))
    assert (await waiting).call.call_id == "c"
    policy.answer("c", Reply(text="x"))
    await call


async def test_a_request_whose_harness_hung_up_is_not_handed_out() -> None:
    policy = StepPolicy()
    gone = asyncio.ensure_future(policy.complete(request("gone")))
    kept = asyncio.ensure_future(policy.complete(request("kept")))
    await settle()
    gone.cancel()
    await settle()
    assert (await policy.next_request()).call.call_id == "kept"
    assert not policy.answer("gone", Reply(text="too late"))
    assert policy.answer("kept", Reply(text="x"))
    assert not policy.answer("kept", Reply(text="twice"))
    assert (await kept).text == "x"


async def test_waiting_for_a_request_can_be_cancelled() -> None:
    policy = StepPolicy()
    waiting = asyncio.ensure_future(policy.next_request())
    await settle()
    waiting.cancel()
    await asyncio.wait({waiting})
    call = asyncio.ensure_future(policy.complete(request("c")))
    assert (await policy.next_request()).call.call_id == "c"
    policy.answer("c", Reply(text="x"))
    await call


async def test_a_failed_call_is_a_policy_error() -> None:
    policy = StepPolicy()
    call = asyncio.ensure_future(policy.complete(request("c")))
    await settle()
    assert policy.fail("c", "the engine is down")
    with pytest.raises(PolicyError, match="the engine is down"):
        await call
    assert not policy.fail("c", "again")


async def test_close_ends_every_wait() -> None:
    policy = StepPolicy()
    call = asyncio.ensure_future(policy.complete(request("c")))
    await policy.next_request()
    waiting = asyncio.ensure_future(policy.next_request())
    await settle()
    await policy.close()
    await policy.close()
    for wait in (call, waiting, policy.complete(request("d")), policy.next_request()):
        with pytest.raises(PolicyError, match="closed"):
            await wait
