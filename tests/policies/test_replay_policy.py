import dataclasses
from collections.abc import Sequence

import pytest

from clawgym_env.calls import (
    CapturedCall,
    Completion,
    Message,
    ModelCall,
    Outcome,
    PolicyRequest,
    Rollout,
    ToolCall,
)
from clawgym_env.errors import PolicyError
from clawgym_env.policies import ReplayPolicy

pytestmark = pytest.mark.anyio


def called(identifier: str, command: str) -> Message:
    return Message("assistant", None, tool_calls=(ToolCall(identifier, "bash", command),))


def call(index: int, messages: Sequence[Message], rollout_id: str = "old") -> ModelCall:
    return ModelCall(
        f"{rollout_id}-{index}", rollout_id, index, "openai_chat", "clawgym", tuple(messages)
    )


def conversation(identifier: str, result: str = "file.txt") -> list[list[Message]]:
    """The messages of a two-call rollout whose tool call has this id."""
    first = [Message("system", "You are careful."), Message("user", "List the files.")]
    second = [*first, called(identifier, "ls"), Message("tool", result, tool_call_id=identifier)]
    return [first, second]


def captured() -> Rollout:
    first, second = conversation("call_1")
    calls = (
        CapturedCall(call(0, first), Completion(Message("assistant", "lost"), "stop"), None, False),
        CapturedCall(
            call(1, first),
            Completion(called("call_1", "ls"), "tool_calls", (5, 6, 7), (-0.1, -0.2, -0.3), 4),
            (1, 2),
            True,
        ),
        CapturedCall(call(2, second), Completion(Message("assistant", "done"), "stop"), None, None),
    )
    return Rollout("old", "task", "react", Outcome.COMPLETED, calls=calls)


async def test_delivered_replies_come_again_though_tool_call_ids_are_new() -> None:
    policy = ReplayPolicy(captured())
    first, second = conversation("call_other")
    for rollout_id in ("new", "newer"):
        reply = await policy.complete(PolicyRequest(call(0, first, rollout_id)))
        assert reply.message == called("call_1", "ls")
        assert (reply.finish_reason, reply.policy_version) == ("tool_calls", 4)
        reply = await policy.complete(PolicyRequest(call(1, second, rollout_id)))
        assert reply.message == Message("assistant", "done")


async def test_sampled_ids_come_again_where_the_session_renders() -> None:
    policy = ReplayPolicy(captured())
    first, _ = conversation("call_1")
    reply = await policy.complete(PolicyRequest(call(0, first, "new"), prompt_ids=(1, 2)))
    assert (reply.token_ids, reply.logprobs, reply.message) == ((5, 6, 7), (-0.1, -0.2, -0.3), None)


async def test_another_conversation_is_an_error_that_names_the_first_difference() -> None:
    policy = ReplayPolicy(captured())
    first, second = conversation("call_9", result="other.txt")
    await policy.complete(PolicyRequest(call(0, first, "new")))
    with pytest.raises(PolicyError) as caught:
        await policy.complete(PolicyRequest(call(1, second, "new")))
    text = str(caught.value)
    assert "captured call 2 (old-2)" in text
    assert "messages[3].content" in text
    assert "'file.txt'" in text and "'other.txt'" in text


async def test_a_shorter_and_a_longer_conversation_are_told() -> None:
    first, second = conversation("call_1")
    with pytest.raises(PolicyError, match=r"messages\[1\]\.role: expected, but .* ends before"):
        await ReplayPolicy(captured()).complete(PolicyRequest(call(0, first[:1], "new")))
    with pytest.raises(PolicyError, match=r"messages\[2\]\.role: not expected"):
        longer = [*first, Message("user", "More.")]
        await ReplayPolicy(captured()).complete(PolicyRequest(call(0, longer, "new")))


async def test_a_call_too_many_is_told() -> None:
    policy = ReplayPolicy(captured())
    first, second = conversation("call_1")
    await policy.complete(PolicyRequest(call(0, first, "new")))
    await policy.complete(PolicyRequest(call(1, second, "new")))
    with pytest.raises(PolicyError, match="all are replayed"):
        await policy.complete(PolicyRequest(call(2, second, "new")))


async def test_parallel_calls_may_arrive_in_another_order() -> None:
    pair = [[Message("user", "left")], [Message("user", "right")]]
    calls = tuple(
        CapturedCall(call(i, m), Completion(Message("assistant", f"to {m[0].text}"), "stop"))
        for i, m in enumerate(pair)
    )
    policy = ReplayPolicy(dataclasses.replace(captured(), calls=calls))
    replies = [await policy.complete(PolicyRequest(call(0, m, "new"))) for m in reversed(pair)]
    texts = [reply.message.text for reply in replies if reply.message]
    assert texts == ["to right", "to left"]


async def test_texts_are_normalised_before_they_are_compared() -> None:
    policy = ReplayPolicy(captured(), normalise=lambda text: text.replace("careful", "quick"))
    first, _ = conversation("call_1")
    changed = [Message("system", "You are quick."), *first[1:]]
    reply = await policy.complete(PolicyRequest(call(0, changed, "new")))
    assert reply.message == called("call_1", "ls")
