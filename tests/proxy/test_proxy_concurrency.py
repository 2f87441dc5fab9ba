"""Many harnesses at once: every call ends up in its own rollout, once, in arrival order."""

import asyncio
import random

import httpx
import openai
import pytest
from proxy_cases import begin, echo

from clawgym_env.calls import PolicyRequest, Reply
from clawgym_env.policies import FunctionPolicy
from clawgym_env.proxy import Proxy, Session
from clawgym_env.store import CaptureStore

pytestmark = pytest.mark.anyio

ROLLOUTS = 4
CLIENTS = 32
CALLS = 5


async def echo_in_its_own_time(request: PolicyRequest) -> Reply:
    chance = random.Random(request.call.messages[0].text)
    await asyncio.sleep(chance.random() * 0.02)
    return echo(request)


async def test_32_clients_over_4_rollouts(store: CaptureStore) -> None:
    async with Proxy(store) as proxy:
        keys = []
        for number in range(ROLLOUTS):
            begin(store, f"r{number}")
            keys.append(proxy.register(Session(f"r{number}", FunctionPolicy(echo_in_its_own_time))))

        async def harness(number: int) -> None:
            rollout = number % ROLLOUTS
            async with openai.AsyncOpenAI(
                base_url=f"{proxy.url}/v1", api_key=keys[rollout], max_retries=0
            ) as client:
                for turn in range(CALLS):
                    said = f"client {number} turn {turn}"
                    text = ""
                    if (number + turn) % 2:
                        async for chunk in await client.chat.completions.create(
                            model="clawgym",
                            messages=[{"role": "user", "content": said}],
                            stream=True,
                        ):
                            text += chunk.choices[0].delta.content or ""
                    else:
                        whole = await client.chat.completions.create(
                            model="clawgym", messages=[{"role": "user", "content": said}]
                        )
                        text = whole.choices[0].message.content or ""
                    assert text == f"r{rollout}: {said}"

        await asyncio.gather(*(harness(number) for number in range(CLIENTS)))
        sealed = [await proxy.seal(f"r{number}") for number in range(ROLLOUTS)]
        assert proxy.in_flight == 0
    per_rollout = CLIENTS // ROLLOUTS * CALLS
    for rollout, calls in enumerate(sealed):
        assert [c.call.index for c in calls] == list(range(per_rollout))
        assert sorted(c.call.messages[0].text for c in calls) == sorted(
            f"client {client} turn {turn}"
            for client in range(rollout, CLIENTS, ROLLOUTS)
            for turn in range(CALLS)
        )
        assert all(c.delivered and c.call.rollout_id == f"r{rollout}" for c in calls)
        arrivals = [c.call.arrived_at for c in calls]
        assert arrivals == sorted(arrivals)
        # The store holds them in order of commitment.
        stored = sorted(store.rollout(f"r{rollout}").calls, key=lambda c: c.call.index)
        assert tuple(stored) == calls
    ids = [c.call.call_id for calls in sealed for c in calls]
    assert len(set(ids)) == CLIENTS * CALLS


async def test_harnesses_that_hang_up_do_not_disturb_the_others(store: CaptureStore) -> None:
    async with Proxy(store) as proxy:
        for name in ("steady", "flaky"):
            begin(store, name)
        steady = Session("steady", FunctionPolicy(echo_in_its_own_time))
        flaky = Session("flaky", FunctionPolicy(echo_in_its_own_time))
        steady_key, flaky_key = proxy.register(steady), proxy.register(flaky)
        received: list[str] = []

        async def call(key: str, text: str, patience: float) -> None:
            body = {"model": "clawgym", "messages": [{"role": "user", "content": text}]}
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(timeout=patience) as client:
                try:
                    url = f"{proxy.url}/v1/chat/completions"
                    response = await client.post(url, json=body, headers=headers)
                except httpx.TimeoutException:
                    return
            received.append(response.json()["choices"][0]["message"]["content"])

        await asyncio.gather(
            *(call(steady_key, f"steady {i}", 30) for i in range(15)),
            *(call(flaky_key, f"flaky {i}", 0.03) for i in range(15)),
        )
        steady_calls = await proxy.seal("steady")
        flaky_calls = await proxy.seal("flaky")
    assert [c.call.index for c in steady_calls] == list(range(15))
    assert all(c.delivered for c in steady_calls)
    assert flaky.calls == len(flaky_calls) + flaky.abandoned
    # What a harness received is captured; what it gave up may or may not have got that far.
    captured = {c.completion.message.text for c in (*steady_calls, *flaky_calls)}
    assert set(received) <= captured
