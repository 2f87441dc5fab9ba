"""What bad requests get: the protocol's own error, from raw bytes on the wire."""

import asyncio
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from proxy_cases import chat, connect, echo, hang_up, raw_request, serving

from clawgym_env.calls import Outcome
from clawgym_env.errors import ConfigError
from clawgym_env.policies import FunctionPolicy
from clawgym_env.proxy import MAX_BODY, Session
from clawgym_env.store import CaptureStore

pytestmark = pytest.mark.anyio


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, after a look whether it has the vendor's shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Authorization", "Bearer KEY"),
        ("authorization", "bearer   KEY"),
        ("x-api-key", "KEY"),
        ("api-key", "KEY"),
        ("x-goog-api-key", "KEY"),
    ],
)
async def test_every_key_header_is_accepted(
    client: httpx.AsyncClient, name: str, value: str
) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        headers = {name: value.replace("KEY", served.key)}
        response = await client.post(f"{served.api}/chat/completions", json=chat(), headers=headers)
    assert response.status_code == 200


async def test_the_right_key_counts_among_several(client: httpx.AsyncClient) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        headers = {"authorization": "Bearer dummy", "x-api-key": served.key}
        response = await client.post(f"{served.api}/chat/completions", json=chat(), headers=headers)
    assert response.status_code == 200


async def test_a_key_in_the_path_goes_before_headers(client: httpx.AsyncClient) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        dummy = {"authorization": "Bearer dummy"}
        base = f"{served.proxy.url}/r/{served.key}"
        assert (await client.get(f"{base}/v1/models", headers=dummy)).status_code == 200
        response = await client.post(f"{base}/v1/chat/completions", json=chat(), headers=dummy)
        assert response.json()["choices"][0]["message"]["content"] == "rollout-1: hello"
        wrong = f"{served.proxy.url}/r/wrong/v1/chat/completions"
        headers = {"authorization": f"Bearer {served.key}"}
        response = await client.post(wrong, json=chat(), headers=headers)
        assert response.status_code == 401


async def test_a_missing_key_says_how_to_send_one(client: httpx.AsyncClient) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        response = await client.post(f"{served.api}/chat/completions", json=chat())
    assert response.status_code == 401
    error = error_of(response)
    assert error["code"] == "invalid_api_key" and "Authorization" in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"model": "clawgym", "messages": [', 400, None),
        (b"", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[1, 2]", 400, None),
        (json.dumps(chat(n=2)).encode(), 400, "n"),
        (json.dumps({"model": "clawgym"}).encode(), 400, "messages"),
        (json.dumps({**chat(), "model": 3}).encode(), 400, "model"),
        (b"[" * 100_000, 400, None),
    ],
)
async def test_bad_bodies(
    client: httpx.AsyncClient, body: bytes, status: int, param: str | None
) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        headers = {"authorization": f"Bearer {served.key}"}
        url = f"{served.api}/chat/completions"
        response = await client.post(url, content=body, headers=headers)
        assert response.status_code == status
        assert error_of(response)["param"] == param
        assert (served.session.calls, served.session.failure) == (0, None)
        # The connection and the rollout go on as if nothing had been.
        assert (await client.post(url, json=chat(), headers=headers)).status_code == 200
    assert [c.call.index for c in served.settled] == [0]


async def test_unknown_fields_are_served_and_kept(client: httpx.AsyncClient) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        headers = {"authorization": f"Bearer {served.key}"}
        body = json.dumps(chat(prompt_cache_key="x", made_up={"a": 1})).encode()
        url = f"{served.api}/chat/completions"
        assert (await client.post(url, content=body, headers=headers)).status_code == 200
    assert served.settled[0].call.raw == body


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_20_mb_is_refused_without_being_held(
    client: httpx.AsyncClient, chunked: bool, closing: bool
) -> None:
    size = 20 * 1024 * 1024
    piece = b"x" * 65536

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size // len(piece)):
            yield piece

    async with serving(FunctionPolicy(echo)) as served:
        headers = {"authorization": f"Bearer {served.key}"}
        if not chunked:
            headers["content-length"] = str(size)
        if closing:
            headers["connection"] = "close"
        url = f"{served.api}/chat/completions"
        tracemalloc.start()
        try:
            response = await client.post(url, content=pieces(), headers=headers)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
        assert peak < MAX_BODY + 8 * 1024 * 1024
        assert (await client.post(url, json=chat(), headers=headers_of(served.key))).is_success


def headers_of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_body_of_nearly_16_mb_is_served(client: httpx.AsyncClient) -> None:
    async with serving(FunctionPolicy(lambda request: echo(request))) as served:
        frame = len(json.dumps(chat("")).encode())
        exact = chat("x" * (MAX_BODY - frame))
        url = f"{served.api}/chat/completions"
        body = json.dumps(exact).encode()
        assert len(body) == MAX_BODY
        response = await client.post(url, content=body, headers=headers_of(served.key))
        assert response.status_code == 200
        response = await client.post(url, content=body + b" ", headers=headers_of(served.key))
        assert response.status_code == 413


async def test_unknown_paths_and_methods(client: httpx.AsyncClient) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        url, key = served.proxy.url, served.key
        assert (await client.get(url)).status_code == 200
        assert (await client.head(f"{url}/")).status_code == 200
        response = await client.post(f"{url}/r/{key}/v1/made_up", json={})
        assert response.status_code == 404 and error_of(response)["code"] == "unknown_url"
        assert key not in response.text
        response = await client.get(f"{url}/v1/chat/completions", headers=headers_of(key))
        assert response.status_code == 405
        assert "POST" in error_of(response)["message"]
        response = await client.post(f"{url}/v1/models", headers=headers_of(key))
        assert response.status_code == 405


async def test_bytes_that_are_no_http(client: httpx.AsyncClient) -> None:
    async with serving(FunctionPolicy(echo)) as served:
        reader, writer = await connect(served)
        writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        await hang_up(writer)
        response = await client.post(
            f"{served.api}/chat/completions", json=chat(), headers=headers_of(served.key)
        )
        assert response.status_code == 200


async def test_a_token_limit(client: httpx.AsyncClient) -> None:
    limits: list[Outcome] = []
    policy = FunctionPolicy(echo)
    async with serving(policy, max_tokens=5, on_limit=limits.append) as served:
        served.session.sampled_tokens = 5
        response = await client.post(
            f"{served.api}/chat/completions", json=chat(), headers=headers_of(served.key)
        )
    assert response.status_code == 429
    assert response.headers["x-should-retry"] == "false"
    assert error_of(response)["code"] == "rollout_limit"
    assert limits == [Outcome.TOKEN_LIMIT]


async def test_a_sealed_rollout_refuses_late_calls_and_counts_them(
    client: httpx.AsyncClient, store: CaptureStore
) -> None:
    async with serving(FunctionPolicy(echo), store=store) as served:
        url, headers = f"{served.api}/chat/completions", headers_of(served.key)
        assert (await client.post(url, json=chat(), headers=headers)).status_code == 200
        calls = await served.proxy.seal("rollout-1")
        assert len(calls) == 1 and calls[0].delivered
        for expected in (1, 2):
            response = await client.post(url, json=chat(), headers=headers)
            assert response.status_code == 410
            assert error_of(response)["code"] == "rollout_sealed"
            assert served.proxy.late_calls == expected
        assert await served.proxy.seal("rollout-1") == calls
        assert await served.proxy.seal("never registered") == ()
    assert store.rollout("rollout-1").calls == calls


async def test_a_seal_while_a_body_comes_in_refuses_it() -> None:
    async with serving(FunctionPolicy(echo)) as served:
        reader, writer = await connect(served)
        request = raw_request(served.key, chat())
        writer.write(request[:-5])
        await writer.drain()
        await asyncio.sleep(0.05)
        assert await served.proxy.seal("rollout-1") == ()
        writer.write(request[-5:])
        assert b" 410 " in await reader.readline()
        await hang_up(writer)
    assert served.proxy.late_calls == 1


async def test_keys_reach_no_log_record_repr_or_error(
    client: httpx.AsyncClient, store: CaptureStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(1)  # below every level, uvicorn's trace of whole requests included

    def fail(request: object) -> str:
        raise RuntimeError("the engine broke")

    async with serving(FunctionPolicy(fail), store=store) as served:
        key = served.key
        for url in (f"{served.api}/chat/completions", f"{served.proxy.url}/r/{key}/v1/nowhere"):
            response = await client.post(url, json=chat(), headers=headers_of(key))
            assert key not in response.text
        for known in (served.proxy, served.session, served.proxy.__dict__):
            assert key not in repr(known)
        with pytest.raises(ConfigError) as caught:
            served.proxy.register(Session("other", FunctionPolicy(echo)), key)
        assert key not in str(caught.value)
    server_side = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert any(r.name.startswith("clawgym_env.proxy") for r in server_side)
    for record in server_side:
        text = logging.Formatter().format(record)
        assert key not in text, record.name
    store.close()
    for file in store.path.parent.iterdir():
        assert key.encode() not in file.read_bytes()


async def test_registering() -> None:
    async with serving(FunctionPolicy(echo)) as served:
        proxy = served.proxy
        with pytest.raises(ConfigError, match="'rollout-1' is registered already"):
            proxy.register(Session("rollout-1", FunctionPolicy(echo)))
        for unusable in ("", "a b", "a/b", "schlüssel"):
            with pytest.raises(ConfigError, match="the key given"):
                proxy.register(Session("other", FunctionPolicy(echo)), unusable)
        assert proxy.register(Session("other", FunctionPolicy(echo)), "fixed") == "fixed"
        await proxy.seal("other")
        # A key may be used again by the next rollout of a stand-alone proxy.
        assert proxy.register(Session("another", FunctionPolicy(echo)), "fixed") == "fixed"
        async with httpx.AsyncClient() as client:
            url = f"{served.api}/chat/completions"
            response = await client.post(url, json=chat(), headers=headers_of("fixed"))
        assert response.json()["choices"][0]["message"]["content"] == "another: hello"
