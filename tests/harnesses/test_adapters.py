"""Adapters in general, and ReAct's own launched for real."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from model_server import Server, script, serve

from clawgym_env.calls import Message, ModelCall, Move
from clawgym_env.errors import HarnessNotInstalledError, UnknownNameError
from clawgym_env.harnesses import HARNESSES, Endpoint, Harness, get_harness, harness_home

MOVES = (
    Move("shell", command="cat in.txt"),
    Move("write", path="a b/x'y.txt", content="hé 'llo'\n%s\\n"),
    Move("finish", content="döne"),
)


def launch(
    harness: Harness, url: str, folder: Path, instruction: str, max_calls: int = 10
) -> subprocess.CompletedProcess[str]:
    """Carries out a launch plan with no sandbox around it."""
    workspace, home = folder / "workspace", folder / "home"
    workspace.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    plan = harness.launch(
        instruction,
        Endpoint(url.removesuffix("/v1"), "secret"),
        python="/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable,
        workspace_path=str(workspace),
        home_path=str(home),
        max_calls=max_calls,
    )
    for path, content in plan.files.items():
        (home / path).write_bytes(content)
    return subprocess.run(
        plan.argv,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **plan.env},
        cwd=workspace,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def check_moves(harness: Harness, folder: Path, moves: Sequence[Move] = MOVES) -> Server:
    (folder / "workspace").mkdir()
    (folder / "workspace" / "in.txt").write_text("forty-two\n")
    with serve() as server:
        server.answers = script(harness.script(moves))
        done = launch(harness, server.url, folder, "Do ït {{ now }}.")
        assert done.returncode == 0, done.stderr
        assert not server.answers
    assert (folder / "workspace/a b/x'y.txt").read_text() == "hé 'llo'\n%s\\n"
    assert "Do ït {{ now }}." in server.requests[0]["messages"][1]["content"]
    assert server.requests[1]["messages"][-1]["content"] == "forty-two"
    for earlier, later in zip(server.requests, server.requests[1:], strict=False):
        assert earlier["tools"] == later["tools"]
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
        assert earlier["model"] in harness.models
    return server


@pytest.mark.parametrize("name", HARNESSES)
def test_every_adapter_describes_itself(name: str) -> None:
    harness = get_harness(name)
    assert harness is get_harness(name)
    assert harness.name == name
    assert harness.env_id == f"clawgym/{harness.title}-v0"
    assert harness.title.isalnum()
    assert "openai_chat" in harness.protocols
    assert harness.models == ("clawgym",)
    call = ModelCall("c", "r", 0, "openai_chat", "clawgym", (Message("user", "hi"),))
    assert harness.classify(call) == "main"


@pytest.mark.parametrize("name", HARNESSES)
def test_every_script_ends_the_task(name: str) -> None:
    harness = get_harness(name)
    whole, unfinished = harness.script(MOVES), harness.script(MOVES[:2])
    assert len(whole) == len(unfinished) == 3
    assert len(harness.script(())) == 1
    for message in (*whole, *unfinished):
        (call,) = message.tool_calls
        assert isinstance(json.loads(call.arguments), dict)
    assert len({message.tool_calls[0].id for message in whole}) == 3


def test_unknown_harness_gets_the_near_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown harness 'raect'; did you mean 'react'"):
        get_harness("raect")


def test_home_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "cache"))
    assert harness_home() == tmp_path / "cache" / "harnesses"
    assert not harness_home().exists()
    monkeypatch.delenv("CLAWGYM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert harness_home() == tmp_path / "xdg" / "clawgym" / "harnesses"


def test_the_secret_is_not_shown() -> None:
    endpoint = Endpoint("http://127.0.0.1:1", "sesame")
    plan = get_harness("react").launch(
        "x", endpoint, python="python3", workspace_path="/w", home_path="/h", max_calls=3
    )
    assert "sesame" in plan.env.values()
    assert "sesame" not in repr(endpoint) + repr(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_react_carries_out_the_moves(tmp_path: Path) -> None:
    harness = get_harness("react")
    assert harness.installed()
    server = check_moves(harness, tmp_path)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    names = [move.tool_calls[0].name for move in harness.script(MOVES)]
    assert names == ["bash", "write_file", "finish"]


def test_react_gives_way_to_the_proxy_at_the_call_limit(tmp_path: Path) -> None:
    harness = get_harness("react")
    with serve() as server:
        server.answers = script(harness.script([Move("shell", command="true")] * 4))
        done = launch(harness, server.url, tmp_path, "x", max_calls=2)
    assert done.returncode == 3
    assert len(server.requests) == 3  # one more than allowed: the proxy refuses it and says why


def test_react_needs_no_installation() -> None:
    harness = get_harness("react")
    lines: list[str] = []
    harness.install(lines.append)
    harness.remove()
    assert harness.installed() and lines
    assert harness.mounts() == ()


def test_mini_swe_agent_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path))
    harness = get_harness("mini-swe-agent")
    assert not harness.installed()
    assert harness.version() is None
    harness.remove()
    with pytest.raises(HarnessNotInstalledError, match="clawgym harness install mini-swe-agent"):
        harness.require_installed()
    with pytest.raises(HarnessNotInstalledError):
        launch(harness, "http://127.0.0.1:1/v1", tmp_path, "x")
    with pytest.raises(HarnessNotInstalledError):
        harness.mounts()
    assert not list(tmp_path.glob("*mini-swe*"))
