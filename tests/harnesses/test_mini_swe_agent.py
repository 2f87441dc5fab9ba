"""The real mini-swe-agent, installed from the package index where it is not installed yet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_server import message, serve, whole
from test_adapters import MOVES, check_moves, launch

from clawgym_env.calls import Move
from clawgym_env.errors import HarnessError
from clawgym_env.harnesses import Harness, get_harness


def test_a_nul_cannot_be_written_through_a_shell() -> None:
    with pytest.raises(HarnessError, match=r"NUL that 'a\.bin' gets"):
        get_harness("mini-swe-agent").script([Move("write", path="a.bin", content="a\0b")])


@pytest.fixture(scope="module")
def mini() -> Harness:
    harness = get_harness("mini-swe-agent")
    harness.install(print)
    return harness


@pytest.mark.harness
def test_it_is_installed_where_sandboxes_can_show_it(mini: Harness) -> None:
    assert mini.version() == "2.4.6"
    for source, target in mini.mounts():
        assert source.is_dir()
        assert target == str(source)


@pytest.mark.harness
def test_it_carries_out_the_moves(mini: Harness, tmp_path: Path) -> None:
    server = check_moves(mini, tmp_path)
    first = server.requests[0]
    assert first["path"] == "/v1/chat/completions"
    assert [tool["function"]["name"] for tool in first["tools"]] == ["bash"]
    # Nothing in the prompt tells of the machine or the time.
    assert [m["content"] for m in first["messages"]] == [
        "Solve the task with the bash tool.",
        "Do ït {{ now }}.\n\nTo end the task, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]
    written = [call.arguments for reply in mini.script(MOVES) for call in reply.tool_calls]
    sent_back = [
        call["function"]["arguments"]
        for turn in server.requests[-1]["messages"]
        for call in turn.get("tool_calls", ())
    ]
    assert sent_back == written[:2]


@pytest.mark.harness
def test_outputs_and_mistakes(mini: Harness, tmp_path: Path) -> None:
    with serve() as server:
        server.answers = [
            whole(message(None, ("bash", {"command": "echo no >&2; exit 3"}))),
            whole(message(None, ("bash", {"command": "head -c 20000 /dev/zero | tr '\\0' x"}))),
            whole(message(None, ("bash", {"command": 'echo "[$OPENAI_API_KEY]"'}))),
            whole(message("no call at all")),
            whole(
                message(None, ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))
            ),
        ]
        done = launch(mini, server.url, tmp_path, "x")
    assert done.returncode == 0, done.stderr
    texts = [m["content"] for m in server.requests[-1]["messages"] if m["role"] != "assistant"]
    half = "x" * 4096
    assert texts[2:] == [
        "no\n[exit status 3]",
        f"{half}\n[11808 characters left out]\n{half}",
        "[]",
        "error: No tool calls found in the response. Every response MUST include at least one "
        "tool call.",
    ]
    assert "secret" not in json.dumps(server.requests)
