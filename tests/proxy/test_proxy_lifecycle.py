"""Starting and closing: sockets, threads, leftovers."""

import asyncio
import gc
import socket
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import httpx
import pytest
from proxy_cases import chat, connect, echo, hang_up, raw_request, serving

from clawgym_env.calls import Message, Reply
from clawgym_env.errors import ConfigError
from clawgym_env.policies import FunctionPolicy, StepPolicy
from clawgym_env.proxy import Proxy, Session

pytestmark = pytest.mark.anyio


def headers_of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_unix_socket_beside_tcp(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    async with serving(FunctionPolicy(echo), socket_path=path) as served:
        assert served.proxy.socket_path == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as client:
            for stream in (False, True):
                response = await client.post(
                    "http://clawgym/v1/chat/completions",
                    json=chat(stream=stream),
                    headers=headers_of(served.key),
                )
                assert response.status_code == 200 and "rollout-1: hello" in response.text
        async with httpx.AsyncClient() as client:
            url = f"{served.api}/chat/completions"
            response = await client.post(url, json=chat(), headers=headers_of(served.key))
            assert response.status_code == 200
    assert not path.exists()
    assert [c.delivered for c in served.settled] == [True, True, True]


async def test_a_socket_left_by_a_killed_proxy_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with serving(FunctionPolicy(echo), socket_path=path):
        pass


async def test_addresses_that_cannot_be_listened_on(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    async with serving(FunctionPolicy(echo), socket_path=path) as served:
        port = int(served.proxy.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"port {port}.*free port"):
            await Proxy().start(port=port)
        with pytest.raises(ConfigError, match="another server listens"):
            await Proxy().start(socket_path=path)
        with pytest.raises(ConfigError, match="started before"):
            await served.proxy.start()
        assert path.exists()
    with pytest.raises(ConfigError, match="started before"):
        await served.proxy.start()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        await Proxy().start(socket_path=tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot listen on the socket"):
        await Proxy().start(socket_path=tmp_path / "missing" / "proxy.sock")
    with pytest.raises(ConfigError, match="may have 107"):
        await Proxy().start(socket_path=tmp_path / ("x" * 200))
    with pytest.raises(ConfigError, match="not started"):
        _ = Proxy().url
    assert (tmp_path / "file").read_text() == "precious"


async def test_a_socket_deep_in_the_file_system_serves(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 20) / ("deeper" * 20)
    folder.mkdir(parents=True)
    path = folder / "proxy.sock"
    for _ in range(2):
        async with serving(FunctionPolicy(echo), socket_path=path):
            assert path.is_socket()
            with pytest.raises(ConfigError, match="another server listens"):
                await Proxy().start(socket_path=path)
            # As a sandbox that mounts the socket at a short path reaches it.
            (tmp_path / "s").symlink_to(path)
            transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "s"))
            async with httpx.AsyncClient(transport=transport) as client:
                answer = await client.get("http://model/v1/models")
                assert answer.status_code == 401
            (tmp_path / "s").unlink()
        assert not path.exists()


async def test_closing_ends_everything_in_every_state(tmp_path: Path) -> None:
    policy = StepPolicy()
    before = asyncio.all_tasks()
    async with serving(policy, socket_path=tmp_path / "proxy.sock") as served:
        _, idle = await connect(served)
        reader, half_sent = await connect(served)
        half_sent.write(raw_request(served.key, chat())[:-3])
        _, thinking = await connect(served)
        thinking.write(raw_request(served.key, chat(stream=True)))
        await policy.next_request()
        unread_reader, unread = await connect(served)
        unread.write(raw_request(served.key, chat()))
        request = await policy.next_request()
        large = Message("assistant", "x" * 4_000_000)
        policy.answer(request.call.call_id, Reply(message=large))
        await unread_reader.readexactly(100)

        await asyncio.gather(served.proxy.close(), served.proxy.close())
        await served.proxy.close()
        assert policy.pending == () and served.proxy.in_flight == 0
        for writer in (idle, half_sent, thinking, unread):
            await hang_up(writer)
    assert asyncio.all_tasks() == before
    assert [c.delivered for c in served.settled] == [False]
    assert not (tmp_path / "proxy.sock").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        gc.collect()


async def test_closing_what_was_never_started() -> None:
    proxy = Proxy()
    await proxy.close()
    await proxy.close()


async def test_a_closed_proxy_still_gives_the_calls_of_its_sessions() -> None:
    async with serving(FunctionPolicy(echo)) as served:
        async with httpx.AsyncClient() as client:
            url = f"{served.api}/chat/completions"
            assert (await client.post(url, json=chat(), headers=headers_of(served.key))).is_success
        await served.proxy.close()
        assert [c.delivered for c in await served.proxy.seal("rollout-1")] == [True]


def test_a_loop_in_another_thread() -> None:
    """As environments have it: the loop in a thread, the harness outside, no signal handlers."""
    found: list[int] = []

    async def main() -> None:
        async with serving(FunctionPolicy(echo)) as served:
            async with httpx.AsyncClient() as client:
                url = f"{served.api}/chat/completions"
                response = await client.post(url, json=chat(), headers=headers_of(served.key))
            found.append(response.status_code)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
    assert found == [200]


def test_nothing_leaks_at_the_end_of_a_program() -> None:
    """A program of its own, with every warning an error and the loop's debug mode on."""
    program = """
import asyncio, httpx
from clawgym_env.policies import StepPolicy
from clawgym_env.proxy import Proxy, Session

async def main():
    policy = StepPolicy()
    async with Proxy() as proxy:
        key = proxy.register(Session("r", policy))
        reader, writer = await asyncio.open_connection(*proxy.url[7:].split(":"))
        body = b'{"model":"clawgym","messages":[{"role":"user","content":"x"}]}'
        writer.write(b"POST /v1/chat/completions HTTP/1.1\\r\\nx-api-key: %s\\r\\n"
                     b"content-length: %d\\r\\n\\r\\n%s" % (key.encode(), len(body), body))
        await policy.next_request()
    assert b" 503 " in await reader.readline()
    writer.close()

asyncio.run(main(), debug=True)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr


async def test_sealed_sessions_are_not_kept() -> None:
    async with Proxy() as proxy:
        session = Session("r", FunctionPolicy(echo))
        proxy.register(session)
        await proxy.seal("r")
        with pytest.raises(ConfigError, match="is sealed"):
            proxy.register(session)
        del session
        gc.collect()
        assert await proxy.seal("r") == ()
