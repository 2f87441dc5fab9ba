"""Captured calls by the handful, and hypothesis strategies for whole groups of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from clawgym_env.calls import (
    CapturedCall,
    Completion,
    Message,
    ModelCall,
    Outcome,
    Rollout,
    ToolCall,
)

VOCABULARY = 11


def captured(
    index: int,
    prompt: Sequence[int] | None,
    reply: Sequence[int] | None,
    *,
    rollout: str = "r0",
    call_id: str | None = None,
    logprobs: Sequence[float] | None | str = "made up",
    delivered: bool | None = True,
    tools: Sequence[str] = (),
    kind: Any = "main",
    version: int = 0,
    drift: str | None = None,
    time: float | None = None,
) -> CapturedCall:
    at = float(index) if time is None else time
    if logprobs == "made up":
        logprobs = None if reply is None else [-0.1 * (1 + t % 7) for t in reply]
    call_id = call_id or f"{rollout}/c{index}"
    return CapturedCall(
        call=ModelCall(
            call_id=call_id,
            rollout_id=rollout,
            index=index,
            protocol="openai_chat",
            model="clawgym",
            messages=(Message("user", "hello"),),
            kind=kind,
            arrived_at=at,
        ),
        completion=Completion(
            message=Message(
                "assistant",
                "hi",
                tool_calls=tuple(ToolCall(f"t{n}", name, "{}") for n, name in enumerate(tools)),
            ),
            finish_reason="stop",
            token_ids=None if reply is None else tuple(reply),
            logprobs=None if logprobs is None else tuple(logprobs),  # type: ignore[arg-type]
            policy_version=version,
            started_at=at,
            finished_at=at + 0.5,
        ),
        prompt_ids=None if prompt is None else tuple(prompt),
        delivered=delivered,
        drift=drift,
    )


def rollout_of(
    calls: Sequence[CapturedCall], reward: float | None = 1.0, rollout: str = "r0"
) -> Rollout:
    return Rollout(
        rollout_id=rollout,
        task_id="t",
        harness="react",
        outcome=Outcome.COMPLETED,
        reward=reward,
        calls=tuple(calls),
        group_id="g",
    )


@st.composite
def rollouts(
    draw: st.DrawFn, max_rollouts: int = 3, max_calls: int = 5, vocabulary: int = VOCABULARY
) -> list[Rollout]:
    """A group with a shared prompt: chains, forks, rewrites, retries, sub-agents, probes.

    The vocabulary is small on purpose, so that rollouts often sample the same tokens.
    """
    token = st.integers(0, vocabulary - 1)
    tokens = st.lists(token, min_size=1, max_size=4)
    shared = draw(st.lists(token, min_size=1, max_size=5))
    group = []
    for number in range(draw(st.integers(1, max_rollouts))):
        name = f"r{number}"
        calls: list[CapturedCall] = []
        for index in range(draw(st.integers(1, max_calls))):
            move = draw(
                st.sampled_from(["extend", "extend", "extend", "fork", "retry", "rewrite", "spawn"])
            )
            base = calls[draw(st.integers(0, len(calls) - 1))] if calls else None
            if base is None or move == "spawn":
                prompt = shared + (draw(tokens) if calls else [])
            elif move == "extend":
                prompt = list(calls[-1].sequence) + draw(tokens)
            elif move == "fork":
                prompt = list(base.sequence) + draw(tokens)
            elif move == "retry":
                prompt = list(base.prompt_ids or ())
            else:
                cut = draw(st.integers(1, len(base.sequence)))
                prompt = list(base.sequence[:cut]) + draw(tokens)
            reply = draw(tokens)
            calls.append(
                captured(
                    index,
                    prompt,
                    reply,
                    rollout=name,
                    logprobs=[-draw(st.integers(1, 40)) / 10 for _ in reply],
                    delivered=draw(st.sampled_from([True, True, True, True, None, False])),
                    kind=draw(st.sampled_from(["main"] * 6 + ["auxiliary"])),
                    version=draw(st.integers(0, 2)),
                )
            )
        group.append(rollout_of(calls, draw(st.integers(0, 4)) / 4, name))
    return group


def long_chain(calls: int, new: int, sampled: int, seed: int = 0) -> list[CapturedCall]:
    """One conversation: each call extends the one before by ``new`` tokens and a reply."""
    rng = np.random.default_rng(seed)
    sequence: list[int] = []
    made = []
    for index in range(calls):
        prompt = sequence + rng.integers(0, 50_000, new).tolist()
        reply = rng.integers(0, 50_000, sampled).tolist()
        made.append(captured(index, prompt, reply))
        sequence = prompt + reply
    return made
