"""The engine behind the proxy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch

from agents.engine import Engine
from agents.engine_policy import EnginePolicy, SamplingOverride
from agents.models.policy import CausalPolicy
from clawgym_env.calls import CapturedCall, Message, ModelCall, PolicyRequest, Reply, Sampling
from clawgym_env.errors import PolicyError, ProtocolError
from clawgym_env.policies import Policy
from clawgym_env.proxy import Proxy, Session

ASKED = Sampling(temperature=0.2, top_p=0.5, top_k=3, max_tokens=40, stop=("x",), seed=4)


def request(ids: tuple[int, ...] | None, sampling: Sampling = ASKED) -> PolicyRequest:
    message = Message("user", "hello")
    call = ModelCall("c", "r", 0, "openai_chat", "clawgym", (message,), sampling=sampling)
    return PolicyRequest(call, ids)


def test_the_harness_parameters_count_unless_overridden() -> None:
    assert SamplingOverride().apply(ASKED) == ASKED
    assert SamplingOverride(temperature=0.0).apply(ASKED).temperature == 0.0
    trained = SamplingOverride.on_policy(max_tokens=30).apply(ASKED)
    assert (trained.temperature, trained.top_p, trained.top_k) == (1.0, 1.0, 0)
    assert (trained.presence_penalty, trained.frequency_penalty) == (0.0, 0.0)
    assert (trained.stop, trained.seed) == (ASKED.stop, ASKED.seed)


@pytest.mark.parametrize(
    ("cap", "asked", "used"), [(None, None, None), (5, None, 5), (None, 6, 6), (5, 6, 5), (7, 6, 6)]
)
def test_max_tokens_is_a_cap(cap: int | None, asked: int | None, used: int | None) -> None:
    applied = SamplingOverride(max_tokens=cap).apply(Sampling(max_tokens=asked))
    assert applied.max_tokens == used


def test_it_is_a_policy_and_answers_with_ids(policy: CausalPolicy, engine: Engine) -> None:
    backend = EnginePolicy(engine, SamplingOverride.on_policy(max_tokens=10))
    assert isinstance(backend, Policy)
    reply = asyncio.run(backend.complete(request((1, 2, 3), Sampling(temperature=0.0, seed=3))))
    sample = engine.submit((1, 2, 3), Sampling(max_tokens=10, seed=3)).result()
    assert reply.logprobs == pytest.approx(sample.logprobs, abs=1e-4)
    assert replace(reply, logprobs=None) == Reply(
        token_ids=sample.token_ids, finish_reason=sample.finish_reason, policy_version=0
    )


def test_what_cannot_be_answered(engine: Engine) -> None:
    backend = EnginePolicy(engine)
    with pytest.raises(PolicyError, match="needs the prompt's token ids; give the proxy's session"):
        asyncio.run(backend.complete(request(None)))
    with pytest.raises(ProtocolError, match="context is 512 tokens, but .* take 600") as caught:
        asyncio.run(backend.complete(request((1,) * 600)))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


async def converse(policy: CausalPolicy, backend: EnginePolicy) -> tuple[CapturedCall, ...]:
    """Two conversations of three turns at once, by the vendor's client through the real proxy."""
    proxy = Proxy(None)
    await proxy.start()
    try:

        async def run(rollout: str) -> tuple[CapturedCall, ...]:
            key = proxy.register(Session(rollout, backend, renderer=policy.renderer))
            messages: list[Any] = [{"role": "user", "content": f"find the file {rollout}"}]
            async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key) as client:
                for _ in range(3):
                    answer = await client.chat.completions.create(
                        model="clawgym", messages=messages, max_tokens=15
                    )
                    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                    messages.append({"role": "user", "content": "go on"})
            return await proxy.seal(rollout, 10)

        first, second = await asyncio.gather(run("a"), run("b"))
        return first + second
    finally:
        await proxy.close()


def test_through_the_proxy_every_call_extends_the_last_and_is_exact(
    policy: CausalPolicy, engine: Engine
) -> None:
    backend = EnginePolicy(engine, SamplingOverride.on_policy(max_tokens=40))
    calls = asyncio.run(converse(policy, backend))
    assert len(calls) == 6
    for captured in calls:
        assert captured.delivered and captured.drift is None
        assert captured.extends == (captured.call.index > 0)
        prompt, reply = captured.prompt_ids, captured.completion.token_ids
        assert prompt is not None and reply is not None and len(reply) <= 15
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([[*prompt, *reply]])).logits[0]
        own = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])
        found = torch.tensor(captured.completion.logprobs)
        torch.testing.assert_close(found, own[:, 0], rtol=0, atol=1e-4)
    # Later turns were read from where the earlier ones ended.
    assert engine.stats.cached_tokens > engine.stats.read_tokens
