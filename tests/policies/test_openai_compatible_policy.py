"""The upstream policy against the project's own proxy as upstream: two proxies in a row."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from clawgym_env.calls import (
    ImagePart,
    Message,
    ModelCall,
    Outcome,
    PolicyRequest,
    Reply,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
)
from clawgym_env.errors import PolicyError, ProtocolError
from clawgym_env.policies import (
    Closable,
    FunctionPolicy,
    OpenAICompatiblePolicy,
    Policy,
    StepPolicy,
)
from clawgym_env.proxy import Proxy, Session

pytestmark = pytest.mark.anyio

RICH = ModelCall(
    "c",
    "r",
    0,
    "openai_chat",
    "asked-for",
    (
        Message("system", "You are careful."),
        Message("user", (TextPart("look"), ImagePart("data:image/png;base64,AAAA"))),
        Message("assistant", None, "hm", (ToolCall("call_1", "bash", '{"command":  "ls"}'),)),
        Message("tool", "a.txt", tool_call_id="call_1"),
        Message("user", "go on", name="ann"),
    ),
    (Tool("bash", "Run it.", {"type": "object"}), Tool("finish")),
    "auto",
    Sampling(0.5, 0.9, 20, 100, ("END",), 7, 0.1, 0.2),
)


@asynccontextmanager
async def upstream(policy: Policy, **settings: Any) -> AsyncIterator[tuple[Session, str, str]]:
    """A proxy that plays the upstream: its session, API root and key."""
    async with Proxy() as proxy:
        session = Session("upstream", policy, models=("*",), **settings)
        yield session, f"{proxy.url}/v1", proxy.register(session)


@asynccontextmanager
async def asking(url: str, key: str | None, **settings: Any) -> AsyncIterator[Any]:
    policy = OpenAICompatiblePolicy(url, key, **settings)
    assert isinstance(policy, Policy) and isinstance(policy, Closable)
    try:
        yield policy
    finally:
        await policy.close()
        await policy.close()


async def test_the_whole_call_arrives_upstream() -> None:
    calls = (ToolCall("call_2", "bash", '{"command": "cat a.txt"}'),)
    answer = Message("assistant", "Reading.", "first the file", calls)
    async with upstream(FunctionPolicy(lambda request: answer)) as (session, url, key):
        async with asking(url, key) as policy:
            reply = await policy.complete(PolicyRequest(RICH))
    assert reply == Reply(message=answer, finish_reason="tool_calls")
    (captured,) = session.captured
    call = captured.call
    assert (call.model, call.stream) == ("asked-for", False)
    assert call.messages == RICH.messages
    assert call.tools == RICH.tools
    assert (call.tool_choice, call.sampling) == (RICH.tool_choice, RICH.sampling)


async def test_what_was_not_said_is_not_sent() -> None:
    call = ModelCall("c", "r", 0, "openai_chat", "any", (Message("user", "x"),))
    async with upstream(FunctionPolicy(lambda request: "hi")) as (session, url, key):
        async with asking(f"{url}/", key, model="other") as policy:
            reply = await policy.complete(PolicyRequest(call))
    assert reply == Reply(message=Message("assistant", "hi"), finish_reason="stop")
    assert json.loads(session.captured[0].call.raw) == {
        "model": "other",
        "messages": [{"role": "user", "content": "x"}],
    }


async def test_two_proxies_in_a_row() -> None:
    """As ``clawgym proxy --upstream`` has it: any model name, captured without ids."""

    def shout(request: PolicyRequest) -> str:
        return request.call.messages[-1].text.upper()

    async with upstream(FunctionPolicy(shout)) as (session, url, key):
        async with asking(url, key) as policy, Proxy() as front:
            captured = Session("front", policy, models=("*",))
            front.register(captured, "fixed-key")
            async with openai.AsyncOpenAI(
                base_url=f"{front.url}/v1", api_key="fixed-key"
            ) as client:
                text = ""
                async for chunk in await client.chat.completions.create(
                    model="gpt-9", messages=[{"role": "user", "content": "quietly"}], stream=True
                ):
                    text += chunk.choices[0].delta.content or ""
            (call,) = await front.seal("front")
    assert text == "QUIETLY"
    assert call.completion.token_ids is None and call.delivered
    assert session.captured[0].call.model == "gpt-9"


async def test_a_harness_that_hangs_up_frees_the_upstream() -> None:
    thinking = StepPolicy()
    async with upstream(thinking) as (session, url, key):
        async with asking(url, key) as policy, Proxy() as front:
            headers = {"authorization": f"Bearer {front.register(Session('front', policy))}"}
            body = {"model": "clawgym", "messages": [{"role": "user", "content": "x"}]}
            async with httpx.AsyncClient(timeout=0.3) as client:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(
                        f"{front.url}/v1/chat/completions", json=body, headers=headers
                    )
            assert await front.seal("front") == ()
            assert await session.settled(10)
            assert thinking.pending == () and session.abandoned == 1


async def test_what_the_upstream_refuses_reaches_the_harness_as_it_was() -> None:
    limits: list[Outcome] = []
    busy = FunctionPolicy(lambda request: "x")
    async with upstream(busy, max_calls=0, on_limit=limits.append) as (_, url, key):
        async with asking(url, key) as policy, Proxy() as front:
            session = Session("front", policy)
            key = front.register(session)
            async with openai.AsyncOpenAI(
                base_url=f"{front.url}/v1", api_key=key, max_retries=0
            ) as client:
                with pytest.raises(openai.RateLimitError) as caught:
                    await client.chat.completions.create(
                        model="clawgym", messages=[{"role": "user", "content": "x"}]
                    )
    assert caught.value.code == "rollout_limit"
    assert session.failure is None and session.captured == ()
    assert limits == [Outcome.CALL_LIMIT]


async def test_a_wrong_upstream_key_is_an_infrastructure_failure_that_quotes_no_key() -> None:
    async with upstream(FunctionPolicy(lambda request: "x")) as (_, url, _key):
        for key in ("sk-wrong", "", None):
            async with asking(url, key) as policy:
                with pytest.raises(
                    PolicyError, match="401; check the upstream's API key"
                ) as caught:
                    await policy.complete(PolicyRequest(RICH))
                assert "sk-wrong" not in str(caught.value) + repr(policy)


@pytest.mark.parametrize(
    ("status", "body", "error", "match"),
    [
        (200, b"no json", PolicyError, "no chat completion"),
        (200, b"[]", PolicyError, "no chat completion"),
        (200, b'{"choices": []}', PolicyError, "no chat completion"),
        (200, b'{"choices": [{"message": "x"}]}', PolicyError, "no chat completion"),
        (500, b"broken", PolicyError, "answered 500: broken"),
        (404, b"no model", PolicyError, "answered 404: no model"),
        (400, b"too long", ProtocolError, "answered 400: too long"),
        (429, b'{"error": {"message": "slow down"}}', ProtocolError, "slow down"),
        (422, b'{"error": "text"}', ProtocolError, "answered 422"),
    ],
)
async def test_upstreams_that_misbehave(
    status: int, body: bytes, error: type[Exception], match: str
) -> None:
    async def answer(request: object) -> Response:
        return Response(body, status)

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    transport = httpx.ASGITransport(app)
    async with asking("http://upstream/v1", "k", transport=transport) as policy:
        with pytest.raises(error, match=match):
            await policy.complete(PolicyRequest(RICH))


async def test_an_upstream_that_is_not_there() -> None:
    async with asking("http://127.0.0.1:1/v1", "k") as policy:
        with pytest.raises(PolicyError, match="gave no answer: ConnectError.*server runs"):
            await policy.complete(PolicyRequest(RICH))
