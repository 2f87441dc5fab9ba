"""What every backend must do, from a user's view; one list of tests for all of them."""

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from clawgym_env.errors import ConfigError, SandboxError
from clawgym_env.sandboxes import Limits, Mount

DAEMON = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"


def sh(script):
    return ["sh", "-c", script]


async def test_output_and_status(create):
    async with create() as box:
        result = await box.exec(sh("echo out; echo err >&2; exit 3"))
        assert (result.returncode, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
        assert not (result.timed_out or result.flooded or result.truncated)
        assert (result.stdout_bytes, result.stderr_bytes) == (4, 4)


async def test_exits_at_once(create):
    async with create() as box:
        assert [(await box.exec([name])).returncode for name in ("true", "false")] == [0, 1]


async def test_status_of_a_signal(create):
    async with create() as box:
        assert (await box.exec(sh("kill -KILL $$"))).returncode == -signal.SIGKILL


async def test_program_that_is_not_there(create):
    async with create() as box:
        result = await box.exec(["no-such-program", "x"])
        assert result.returncode == 127
        assert b"no-such-program" in result.stderr


async def test_program_that_cannot_be_run(create):
    async with create() as box:
        await box.put("tool", b"#!/bin/sh\necho ran\n")
        assert (await box.exec([box.workspace_path + "/tool"])).returncode == 126
        await box.put("tool", b"#!/bin/sh\necho ran\n", 0o755)
        assert (await box.exec([box.workspace_path + "/tool"])).stdout == b"ran\n"


async def test_environment_is_clean(create, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
    async with create() as box:
        result = await box.exec(["env", "-0"], env={"GIVEN": "a=b\nc", "LANG": "C"})
        env = dict(entry.split(b"=", 1) for entry in result.stdout.rstrip(b"\0").split(b"\0"))
        assert env[b"GIVEN"] == b"a=b\nc"
        assert env[b"LANG"] == b"C"
        assert env[b"TZ"] == b"UTC"
        assert env[b"HOME"] == box.home_path.encode()
        names = {b"GIVEN", b"PATH", b"HOME", b"USER", b"LANG", b"TZ", b"TMPDIR", b"PWD"}
        assert set(env) <= names | {b"CLAWGYM_SANDBOX"}


async def test_no_descriptor_is_inherited(create):
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        async with create() as box:
            result = await box.exec(["ls", "/proc/self/fd"])
            assert result.stdout.split() == [b"0", b"1", b"2", b"3"]  # the last is ls' own


async def test_signals_have_their_defaults(create):
    # A manager in the background of a script ignores SIGINT and passes that on.
    mine = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with create() as box:
            status = (await box.exec(["cat", "/proc/self/status"])).stdout.decode()
    finally:
        signal.signal(signal.SIGINT, mine)
    for field in ("SigIgn", "SigBlk"):
        (bits,) = re.findall(rf"{field}:\s+([0-9a-f]+)", status)
        # The C library keeps signals 32 and 33 to itself: no program can set them by its means.
        assert int(bits, 16) & ~(0b11 << 31) == 0, field


async def test_working_directory(create):
    async with create() as box:
        assert (await box.exec(["pwd"])).stdout.decode().strip() == box.workspace_path
        await box.put("a/b/file", b"")
        assert (await box.exec(["ls"], cwd="a/b")).stdout == b"file\n"
        assert (await box.exec(["pwd"], cwd="/usr")).stdout == b"/usr\n"
        with pytest.raises(SandboxError, match="not-there"):
            await box.exec(["pwd"], cwd="not-there")


async def test_home_and_temporary_directory_are_writable(create):
    async with create() as box:
        result = await box.exec(sh("echo a > ~/a && mktemp && cat ~/a"))
        assert result.returncode == 0
        assert result.stdout.endswith(b"a\n")
        assert await box.get("a", area="home") == b"a\n"


async def test_stdin(create):
    async with create() as box:
        assert (await box.exec(["cat"])).stdout == b""
        assert (await box.exec(["cat"], stdin=b"\x00\xff text")).stdout == b"\x00\xff text"
        result = await box.exec(["wc", "-c"], stdin=bytes(3 << 20))
        assert result.stdout.strip() == str(3 << 20).encode()


async def test_stdin_that_is_not_read(create):
    async with create() as box:
        assert (await box.exec(["true"], stdin=bytes(3 << 20))).returncode == 0


async def test_standard_streams_can_be_opened_by_name(create):
    async with create() as box:
        script = "cat /dev/stdin > /dev/stdout; echo err > /dev/stderr"
        result = await box.exec(sh(script), stdin=b"in")
        assert (result.stdout, result.stderr) == (b"in", b"err\n")


async def test_unicode_and_odd_arguments(create):
    async with create() as box:
        words = ["naïve ☃", "", "-n", "a\nb", "'\"$HOME"]
        result = await box.exec(["printf", "%s|", *words], env={"ÜN": "✓"})
        assert result.stdout.decode() == "".join(f"{word}|" for word in words)
        assert (await box.exec(["printenv", "ÜN"], env={"ÜN": "✓"})).stdout == "✓\n".encode()
        await box.put("räksmörgås/日本 語.txt", b"x")
        assert (await box.exec(sh("ls *"))).stdout.decode() == "日本 語.txt\n"


@pytest.mark.parametrize("argv, env", [([], {}), ([""], {}), (["a\0"], {}), (["a"], {"x=": "y"})])
async def test_commands_that_nothing_can_run(create, argv, env):
    async with create() as box:
        with pytest.raises(SandboxError):
            await box.exec(argv, env=env)


async def test_garbage_is_kept_as_bytes(create):
    async with create() as box:
        assert (await box.exec(sh(r"printf '\377\376\000\n'"))).stdout == b"\xff\xfe\x00\n"


async def test_wall_time_kills(create, mark):
    async with create() as box:
        script = "trap '' TERM INT HUP; echo begun; sleep 1000 & sleep 1000; sleep 1000"
        result = await box.exec(sh(script), env=mark.env, limits=Limits(wall_s=0.3))
        assert result.timed_out
        assert result.returncode is None
        assert result.stdout == b"begun\n"
        assert not mark.alive()


async def test_wall_time_kills_though_nobody_waits(create, mark):
    async with create() as box:
        process = await box.start(["sleep", "1000"], env=mark.env, limits=Limits(wall_s=0.1))
        while mark.alive():
            await asyncio.sleep(0.02)
        assert (await process.wait()).timed_out


async def test_kill(create, mark):
    async with create() as box:
        process = await box.start(sh("sleep 1000 & sleep 1000"), env=mark.env)
        assert mark.alive()
        assert Path(f"/proc/{process.pid}").exists()
        await process.kill()
        assert not mark.alive()
        assert not Path(f"/proc/{process.pid}").exists()
        first, second = await process.wait(), await process.wait()
        assert first is second
        assert first.returncode is None
        assert not first.timed_out
        await process.kill()


async def test_daemon_dies_with_its_command(create, mark):
    async with create() as box:
        script = DAEMON + "print('daemon', flush=True); time.sleep(1000)"
        argv = sh(f'{box.python} -c "{script}"; while ! grep -q d out; do sleep 0.01; done')
        await box.put("out", b"d")
        result = await box.exec(argv, env=mark.env)
        assert result.returncode == 0
        assert not mark.alive()


async def test_daemon_dies_in_kill_all(create, mark):
    async with create() as box:
        script = DAEMON + "open('up', 'w').close(); time.sleep(1000)"
        await box.start(sh(f'{box.python} -c "{script}"; exec sleep 1000'), env=mark.env)
        while not (box.workspace / "up").exists():
            await asyncio.sleep(0.01)
        assert len(mark.alive()) >= 2
        await box.kill_all()
        assert not mark.alive()
        assert (await box.exec(["true"])).returncode == 0


async def test_signals_to_the_own_group_miss_the_launcher(create):
    async with create() as box:
        assert (await box.exec(sh("kill -TERM 0; sleep 1000"))).returncode == -signal.SIGTERM


async def test_flood_is_killed(create):
    async with create() as box:
        limits = Limits(output_kb=1024)
        result = await box.exec(["cat", "/dev/zero"], limits=limits)
        assert result.flooded
        assert result.returncode is None
        assert result.truncated
        assert len(result.stdout) == 64 << 10
        assert result.stdout_bytes > 1 << 20


async def test_flood_on_both_streams_counts_together(create):
    async with create() as box:
        result = await box.exec(sh("yes >&2 & yes"), limits=Limits(output_kb=256))
        assert result.flooded


async def test_large_output_keeps_its_end(create):
    async with create() as box:
        argv = sh("head -c 60000000 /dev/zero; echo end; echo small >&2")
        result = await box.exec(argv, limits=Limits(output_kb=None, tail_kb=1))
        assert result.returncode == 0
        assert not result.flooded
        assert result.truncated
        assert result.stdout == bytes(1020) + b"end\n"
        assert result.stderr == b"small\n"
        assert result.stdout_bytes == 60_000_004


async def test_limits_on_files_and_descriptors(create):
    async with create() as box:
        limits = Limits(open_files=50, file_mb=1)
        assert (await box.exec(sh("ulimit -n"), limits=limits)).stdout == b"50\n"
        result = await box.exec(sh("head -c 2000000 /dev/zero > big"), limits=limits)
        assert result.returncode != 0
        assert (box.workspace / "big").stat().st_size == 1 << 20


async def test_limit_on_memory(create):
    async with create() as box:
        argv = [box.python, "-I", "-S", "-c", "x = bytearray(500 << 20); print(len(x))"]
        result = await box.exec(argv, limits=Limits(memory_mb=200))
        assert b"MemoryError" in result.stderr
        assert (await box.exec(argv, limits=Limits(memory_mb=900))).returncode == 0


@pytest.mark.parametrize("name", ["wall_s", "output_kb", "pids", "tail_kb"])
def test_limits_are_above_zero(name):
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: 0})


async def test_put_and_get(create):
    async with create() as box:
        await box.put("deep/er/file.bin", b"\x00\xff" * 1000, 0o640)
        assert await box.get("deep/er/file.bin") == b"\x00\xff" * 1000
        assert stat.S_IMODE((box.workspace / "deep/er/file.bin").stat().st_mode) == 0o640
        await box.put("./deep//er/file.bin", b"second")
        assert await box.get("deep/er/file.bin") == b"second"
        # What was put belongs to what runs inside.
        result = await box.exec(sh("echo more >> deep/er/file.bin; touch deep/x; ls -A deep/er"))
        assert (result.stdout, result.stderr) == (b"file.bin\n", b"")
        assert await box.get("deep/er/file.bin") == b"secondmore\n"


async def test_put_files_into_home(create):
    async with create() as box:
        await box.put_files({".config/a.json": b"{}", ".rc": b"x"}, area="home")
        assert (await box.exec(sh("cat ~/.config/a.json ~/.rc"))).stdout == b"{}x"
        with pytest.raises(SandboxError, match="area"):
            await box.put("x", b"", area="etc")


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a/..", "x\0y"])
async def test_paths_that_leave_are_refused(create, path):
    async with create() as box:
        with pytest.raises(SandboxError):
            await box.put(path, b"x")
        with pytest.raises(SandboxError):
            await box.get(path)


async def test_links_that_leave_are_refused(create, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("host")
    async with create() as box:
        await box.exec(sh(f"ln -s {secret} out; ln -s {secret}/file file; ln -s . in"))
        for path in ("out/file", "file", "in/file"):
            with pytest.raises(SandboxError):
                await box.get(path)
        for path in ("out/file", "out/new", "in/new"):
            with pytest.raises(SandboxError):
                await box.put(path, b"x")
        await box.put("file", b"mine")  # replaces the link, not what it leads to
        assert (secret / "file").read_text() == "host"
        assert os.listdir(secret) == ["file"]
        assert await box.get("file") == b"mine"


async def test_get_of_what_is_no_file(create):
    async with create() as box:
        await box.exec(sh("mkfifo pipe; mkdir dir; truncate -s 5T sparse"))
        await box.exec(sh("echo x > shut; chmod 0 *"))
        for path in ("pipe", "dir", "sparse", "missing"):
            with pytest.raises(SandboxError, match=path):
                await box.get(path)
        assert await box.get("shut") == b"x\n"


async def test_snapshot(create, tmp_path):
    async with create() as box:
        await box.exec(
            sh(
                "echo a > file; ln -s file link; ln -s /etc/passwd away; ln file hard; "
                "mkfifo pipe; mkdir -p d/e; echo b > d/e/tool; chmod 755 d/e/tool; "
                "echo c > shut; chmod 0 shut; "
                "mkdir closed; echo d > closed/x; chmod 0 closed; touch -d @1000000000 file"
            )
        )
        server = socket.socket(socket.AF_UNIX)
        here = os.open(box.workspace, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{here}/socket")
        finally:
            os.close(here)
            server.close()
        dest = tmp_path / "copy"
        await box.snapshot(dest)
        names = sorted(str(path.relative_to(dest)) for path in dest.rglob("*"))
        assert names == [
            "away", "closed", "closed/x", "d", "d/e", "d/e/tool", "file", "hard", "link", "shut",
        ]  # fmt: skip
        assert os.readlink(dest / "link") == "file"
        assert os.readlink(dest / "away") == "/etc/passwd"
        assert (dest / "d/e/tool").stat().st_mode & 0o777 == 0o755
        assert (dest / "file").stat().st_mtime == 1_000_000_000
        assert (dest / "closed/x").read_text() == "d\n"
        with pytest.raises(SandboxError, match="not empty"):
            await box.snapshot(dest)


async def test_snapshot_is_bounded(create, tmp_path):
    async with create() as box:
        await box.exec(sh("truncate -s 5T sparse"))
        with pytest.raises(SandboxError, match="bytes"):
            await box.snapshot(tmp_path / "sparse")
        await box.exec(sh("rm sparse; head -c 3000 /dev/zero > a; cp a b"))
        with pytest.raises(SandboxError, match="5999 bytes"):
            await box.snapshot(tmp_path / "small", max_bytes=5999)
        await box.snapshot(tmp_path / "enough", max_bytes=6000)


async def test_load_of_a_snapshot(create, tmp_path):
    async with create("first") as box:
        await box.exec(sh("mkdir d; echo a > d/a; ln -s d/a link; chmod 600 d/a"))
        await box.snapshot(tmp_path / "copy")
    async with create("second") as box:
        await box.load(tmp_path / "copy")
        assert (await box.exec(sh("cat link && echo b >> d/a && rm link"))).stdout == b"a\n"
        with pytest.raises(SandboxError, match="not empty"):
            await box.load(tmp_path / "copy")


async def test_files_made_inside_are_the_managers_to_read_and_remove(create):
    async with create() as box:
        await box.exec(sh("umask 077; mkdir d; echo x > d/f; chmod 400 d/f; chmod 500 d"))
        assert (box.workspace / "d/f").read_bytes() == b"x\n"


async def test_destroy_removes_what_resists(create):
    async with create() as box:
        script = (
            "import os\n"
            "os.makedirs('shut/in'); open('shut/in/f', 'w').close()\n"
            "os.chmod('shut/in', 0); os.chmod('shut', 0)\n"
            "os.mkdir('ro'); open('ro/f', 'w').close(); os.chmod('ro', 0o500)\n"
            "os.symlink('/etc', 'etc'); os.mkfifo('pipe')\n"
            "for i in range(25): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
            "os.chdir('/'); os.chmod(os.environ['WS'], 0)\n"
        )
        argv = [box.python, "-I", "-S", "-c", script]
        result = await box.exec(argv, env={"WS": box.workspace_path})
        assert result.stderr == b""
    assert Path("/etc/passwd").exists()


async def test_destroy_while_running(create, mark):
    async with create() as box:
        process = await box.start(sh("while :; do date > f; mkdir -p d/$$; done"), env=mark.env)
        waiting = asyncio.create_task(process.wait())
        await asyncio.sleep(0)
        await box.destroy()
        assert (await waiting).returncode is None
        assert not mark.alive()
        await box.destroy()
        for use in (box.start(["true"]), box.put("a", b""), box.get("a")):
            with pytest.raises(SandboxError, match="destroyed"):
                await use


async def test_destroy_while_starting(create, mark):
    async with create() as box:
        starts = [asyncio.create_task(box.start(["sleep", "1000"], env=mark.env)) for _ in range(4)]
        await asyncio.sleep(0)
        await box.destroy()
        results = await asyncio.gather(*starts, return_exceptions=True)
        for process in results:
            if isinstance(process, BaseException):
                assert isinstance(process, SandboxError)
            else:
                assert (await process.wait()).returncode is None
        assert not mark.alive()


async def test_cancelled_exec_kills(create, mark):
    async with create() as box:
        task = asyncio.create_task(box.exec(["sleep", "1000"], env=mark.env))
        while not mark.alive():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not mark.alive()


async def test_commands_side_by_side(create):
    async with create() as box:
        argv = sh("echo $N >> log; while [ $(wc -l < log) -lt 8 ]; do sleep 0.01; done; echo $N")
        runs = [box.exec(argv, env={"N": str(n)}) for n in range(8)]
        results = await asyncio.gather(*runs)
        assert [result.stdout for result in results] == [b"%d\n" % n for n in range(8)]


async def test_sixteen_sandboxes_at_once(create, mark):
    async def one(number):
        async with create(f"box-{number}") as box:
            await box.put("in", str(number).encode())
            process = await box.start(sh("cat in > new; mv new out; exec sleep 1000"), env=mark.env)
            while not (box.workspace / "out").exists():
                await asyncio.sleep(0.01)
            nonlocal up
            up += 1
            while up < 16:
                await asyncio.sleep(0.01)
            assert Path(f"/proc/{process.pid}").exists()
            return await box.get("out")

    up = 0
    results = await asyncio.gather(*(one(number) for number in range(16)))
    assert results == [str(number).encode() for number in range(16)]
    assert not mark.alive()


async def test_ids_are_plain_and_unique(create, backend, tmp_path):
    async with create("a.b_c-1"):
        with pytest.raises(SandboxError, match="exists"):
            await backend.create(sandbox_id="a.b_c-1", root=tmp_path / "root")
        for name in ("", "..", ".x", "a/b", "ü", "a" * 200):
            with pytest.raises(SandboxError, match="id"):
                await backend.create(sandbox_id=name, root=tmp_path / "root")


async def test_mounts_that_cannot_be(backend, tmp_path):
    for source, target in (("none", "/opt/x"), ("", "opt"), ("", "/a/..")):
        mount = Mount(tmp_path / source, target)
        with pytest.raises(SandboxError, match="cannot mount"):
            await backend.create(sandbox_id="box", root=tmp_path / "root", mounts=[mount])
    assert not (tmp_path / "root").exists()


async def test_mount_at_its_own_path(create, tmp_path):
    tool = tmp_path / "tools" / "greet"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho hello\n")
    tool.chmod(0o755)
    async with create(mounts=[Mount(tool.parent, str(tool.parent))]) as box:
        assert (await box.exec([str(tool)])).stdout == b"hello\n"


def test_event_loop_outside_the_main_thread(create, mark):
    async def story():
        async with create() as box:
            process = await box.start(["sleep", "1000"], env=mark.env)
            results.append(await box.exec(["echo", "hi"]))
            await asyncio.sleep(0.1)  # and it outlives whatever spawned it
            assert mark.alive()
            await process.kill()

    results = []
    thread = threading.Thread(target=lambda: asyncio.run(story()))
    thread.start()
    thread.join()
    assert [result.stdout for result in results] == [b"hi\n"]
    assert not mark.alive()


MANAGER = """
import asyncio, pathlib, sys
sys.path[:0] = {path!r}
from clawgym_env.sandboxes.bubblewrap import BubblewrapBackend
from clawgym_env.sandboxes.process import ProcessBackend

async def main():
    backend = {backend}
    for n in range(3):
        box = await backend.create(sandbox_id=f"box-{{n}}", root=pathlib.Path({root!r}))
        script = "setsid sleep 1000 & setsid sh -c 'trap : TERM; sleep 1000; sleep 1000' & wait"
        await box.start(["sh", "-c", script], env={env!r})
    print("up", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_manager_killed_leaves_no_process(backend, tmp_path, mark):
    made = {
        "process": "ProcessBackend()",
        "bubblewrap": f"BubblewrapBackend(separate_uids={getattr(backend, '_separate', None)})",
    }[backend.name]
    source = MANAGER.format(path=sys.path, backend=made, root=str(tmp_path / "root"), env=mark.env)
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as manager:
        try:
            assert manager.stdout.readline() == b"up\n"
            while len(mark.alive()) < 12:  # three sandboxes of a shell, a shell, two sleepers
                assert manager.poll() is None
        finally:
            manager.kill()
    assert mark.gone()
