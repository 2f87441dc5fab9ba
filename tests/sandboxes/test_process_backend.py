"""What is particular to the process backend, and how backends are chosen."""

import os
import signal

import pytest
from sandbox_making import maker, usable

from clawgym_env.errors import SandboxError, UnknownNameError
from clawgym_env.sandboxes import BACKENDS, Limits, Mount, default_backend, get_backend


@pytest.fixture
def create(tmp_path):
    return maker(usable("process"), tmp_path)


async def test_model_is_the_proxys_own_url(create, tmp_path):
    async with create(proxy_url="http://127.0.0.1:1", proxy_socket=tmp_path / "s") as box:
        assert box.model_url == "http://127.0.0.1:1"
        assert box.workspace_path == str(box.workspace)
        assert box.home_path == str(box.home)


async def test_mounts_elsewhere_are_refused(create, tmp_path):
    with pytest.raises(SandboxError, match="own paths"):
        async with create(mounts=[Mount(tmp_path, "/opt/x")]):
            pass


async def test_launcher_killed_by_its_command(create, mark):
    async with create() as box:
        script = (
            "setsid sleep 1000 & setsid sleep 1000 & read go < go; kill -KILL $PPID; sleep 1000"
        )
        await box.exec(["mkfifo", "go"])
        process = await box.start(["sh", "-c", script], env=mark.env)
        await box.exec(["sh", "-c", "echo > go"])
        with pytest.raises(SandboxError, match="died under it"):
            await process.wait()
        await box.kill_all()
        assert not mark.alive()


async def test_launcher_stopped_by_its_command(create, mark):
    async with create() as box:
        script = "read go < go; kill -STOP $PPID; sleep 1000"
        await box.exec(["mkfifo", "go"])
        process = await box.start(["sh", "-c", script], env=mark.env)
        await box.exec(["sh", "-c", "echo > go"])
        await process.kill()
        assert not mark.alive()


async def test_sandboxes_spare_each_other(create, mark):
    async with create("first") as first, create("second") as second:
        spared = await second.start(["sleep", "1000"], env=mark.env)
        await first.start(["sleep", "1000"])
        await first.destroy()
        assert len(mark.alive()) == 1
        os.kill(spared.pid, 0)
        await second.kill_all()
        assert (await spared.wait()).returncode is None


async def test_limit_on_cpu_time(create):
    async with create() as box:
        argv = ["sh", "-c", "while :; do :; done"]
        assert (await box.exec(argv, limits=Limits(cpu_s=1))).returncode == -signal.SIGXCPU


async def test_command_ended_by_a_signal_from_outside(create, mark):
    async with create() as box:
        process = await box.start(["sleep", "1000"], env=mark.env)
        (pid,) = mark.alive()
        os.kill(pid, signal.SIGINT)
        assert (await process.wait()).returncode == -signal.SIGINT


def test_names():
    assert list(BACKENDS) == ["bubblewrap", "process"]
    for name in BACKENDS:
        assert get_backend(name).name == name
    with pytest.raises(UnknownNameError, match="did you mean 'bubblewrap'"):
        get_backend("bublewrap")


def test_default_is_isolated_where_that_works():
    works = get_backend("bubblewrap").check() is None
    assert default_backend().name == ("bubblewrap" if works else "process")
