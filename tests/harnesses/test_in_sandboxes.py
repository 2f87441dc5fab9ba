"""Launch plans carried out in real sandboxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from model_server import Server, script, serve

from clawgym_env.calls import Move
from clawgym_env.harnesses import Endpoint, Harness, get_harness
from clawgym_env.sandboxes import Limits, Mount, ProcessResult, get_backend

MOVES = (
    Move("shell", command="cat in.txt; ls -A; env | grep -c secret"),
    Move("write", path="out/answer.txt", content="42"),
    Move("finish", content="done"),
)


async def run(harness: Harness, backend: str, server: Server, root: Path) -> ProcessResult:
    sandbox = await get_backend(backend).create(
        sandbox_id="one",
        root=root,
        proxy_url=server.url.removesuffix("/v1"),
        mounts=[Mount(source, target) for source, target in harness.mounts()],
        network=True,
    )
    try:
        await sandbox.put("in.txt", b"forty-two\n")
        plan = harness.launch(
            "Do it.",
            Endpoint(sandbox.model_url, "secret"),
            python=sandbox.python,
            workspace_path=sandbox.workspace_path,
            home_path=sandbox.home_path,
            max_calls=5,
        )
        await sandbox.put_files(plan.files, area="home")
        result = await sandbox.exec(plan.argv, env=plan.env, limits=Limits(wall_s=120))
        assert await sandbox.get("out/answer.txt") == b"42"
    finally:
        await sandbox.destroy()
    return result


def check(name: str, backend: str, root: Path) -> None:
    if missing := get_backend(backend).check():
        pytest.skip(missing)
    harness = get_harness(name)
    harness.install(print)
    with serve() as server:
        server.answers = script(harness.script(MOVES))
        result = asyncio.run(run(harness, backend, server, root))
    assert result.returncode == 0, result.stderr
    assert not server.answers
    assert server.requests[1]["messages"][-1]["content"].splitlines()[:3] == [
        "forty-two",
        "in.txt",
        "0",
    ]


@pytest.mark.parametrize("backend", ["process", "bubblewrap"])
def test_react(backend: str, tmp_path: Path) -> None:
    check("react", backend, tmp_path)


@pytest.mark.harness
@pytest.mark.parametrize("backend", ["process", "bubblewrap"])
def test_mini_swe_agent(backend: str, tmp_path: Path) -> None:
    check("mini-swe-agent", backend, tmp_path)
