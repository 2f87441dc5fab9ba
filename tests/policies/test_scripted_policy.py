import asyncio

import pytest

from clawgym_env.calls import CallKind, Message, ModelCall, PolicyRequest, Reply
from clawgym_env.errors import PolicyError
from clawgym_env.policies import FunctionPolicy, Policy, ScriptedPolicy, as_reply

pytestmark = pytest.mark.anyio


def request(rollout_id: str = "r", index: int = 0, kind: CallKind = "main") -> PolicyRequest:
    call = ModelCall(
        f"{rollout_id}-{index}",
        rollout_id,
        index,
        "openai_chat",
        "clawgym",
        (Message("user", f"question {index}"),),
        kind=kind,
    )
    return PolicyRequest(call)


async def test_a_sequence_is_played_to_each_rollout_from_its_start() -> None:
    policy = ScriptedPolicy(["first", Message("assistant", "second"), Reply(text="third")])
    assert isinstance(policy, Policy)
    replies = await asyncio.gather(
        *(policy.complete(request(rollout, i)) for i in range(3) for rollout in ("a", "b"))
    )
    first, second, third = (
        Reply(text="first"),
        Reply(message=Message("assistant", "second")),
        Reply(text="third"),
    )
    assert replies == [first, first, second, second, third, third]


async def test_a_factory_is_asked_once_a_rollout() -> None:
    asked: list[str] = []

    def script(rollout_id: str) -> list[str]:
        asked.append(rollout_id)
        return [f"{rollout_id} one", f"{rollout_id} two"]

    policy = ScriptedPolicy(script)
    texts = [(await policy.complete(request(r))).text for r in ("a", "b", "a", "b")]
    assert texts == ["a one", "b one", "a two", "b two"]
    assert asked == ["a", "b"]


async def test_a_mapping_names_the_rollout_it_lacks() -> None:
    policy = ScriptedPolicy({"a": ["x"]})
    assert (await policy.complete(request("a"))).text == "x"
    with pytest.raises(PolicyError, match="'b'"):
        await policy.complete(request("b"))


async def test_auxiliary_calls_use_no_entry_up() -> None:
    policy = ScriptedPolicy(["main"], auxiliary="a title")
    assert (await policy.complete(request(kind="auxiliary"))).text == "a title"
    assert (await policy.complete(request())).text == "main"


async def test_a_script_that_is_used_up_says_how_long_it_was() -> None:
    policy = ScriptedPolicy(["only"])
    await policy.complete(request())
    with pytest.raises(PolicyError, match="holds 1 replies.*main call number 2"):
        await policy.complete(request())


async def test_functions_may_be_plain_or_async() -> None:
    async def later(asked: PolicyRequest) -> str:
        await asyncio.sleep(0)
        return f"{asked.call.messages[-1].text}!"

    plain = FunctionPolicy(lambda asked: Message("assistant", asked.call.rollout_id))
    assert (await plain.complete(request("r7"))).message == Message("assistant", "r7")
    assert (await FunctionPolicy(later).complete(request())).text == "question 0!"


def test_what_is_no_reply_is_refused() -> None:
    with pytest.raises(PolicyError, match="not int"):
        as_reply(3)  # type: ignore[arg-type]
