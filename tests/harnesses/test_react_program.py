"""The program runs for real, in a process of its own, against a real HTTP server with a script."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from model_server import Answer, Server, body, error, message, raw, serve, whole

from clawgym_env.harnesses import react_program
from clawgym_env.harnesses.react import PROGRAM

PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


def run(
    server: Server, folder: Path, *arguments: str, **env: str
) -> subprocess.CompletedProcess[bytes]:
    variables = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": "secret",
        "OPENAI_MODEL": "m",
    }
    return subprocess.run(
        [PYTHON, "-I", "-S", str(PROGRAM), *(arguments or ("Do it.",))],
        cwd=folder,
        env=variables | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )


def streamed(reply: dict[str, Any], *, end: bytes = b"data: [DONE]\n\n") -> Answer:
    """Every text in pieces of three characters, every event in two chunks."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    for key in ("reasoning_content", "content"):
        text = reply.get(key) or ""
        deltas += [{key: text[i : i + 3]} for i in range(0, len(text), 3)]
    for index, call in enumerate(reply.get("tool_calls", ())):
        name, text = call["function"]["name"], call["function"]["arguments"]
        head = {"index": index, "id": call["id"], "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": text[i : i + 3]}}]}
            for i in range(0, len(text), 3)
        ]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        events = [b": keep-alive\n\n"]
        events += [
            b"data: " + json.dumps({"choices": [{"index": 0, "delta": d}]}).encode() + b"\n\n"
            for d in deltas
        ]
        usage = {"choices": [], "usage": {"total_tokens": 1}}
        events.append(b"data: " + json.dumps(usage).encode() + b"\n\n")
        for event in [*events, end]:
            for piece in filter(None, (event[:7], event[7:])):
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    return answer


CONVERSATION = [
    message("Look first: é.", ("bash", {"command": "cat in.txt; exit 3"})),
    message(
        None,
        ("write_file", {"path": "sub/out.txt", "content": "ü\n"}),
        ("read_file", {"path": "sub/out.txt"}),
    ),
    message(None, ("finish", {"answer": "all dóne"})),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_conversation(server: Server, tmp_path: Path, stream: bool) -> None:
    (tmp_path / "in.txt").write_text("forty-two\n")
    server.answers = [(streamed if stream else whole)(reply) for reply in CONVERSATION]

    done = run(server, tmp_path, "Do ït.", REACT_STREAM="1" if stream else "0")

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == "all dóne\n"
    assert (tmp_path / "sub/out.txt").read_text() == "ü\n"
    first, second, third = server.requests
    assert first["path"] == "/v1/chat/completions"
    assert first["model"] == "m"
    assert first.get("stream", False) is stream
    assert [tool["function"]["name"] for tool in first["tools"]] == react_program.names()
    assert first["messages"] == [
        {"role": "system", "content": react_program.SYSTEM},
        {"role": "user", "content": "Do ït."},
    ]
    assert second["messages"] == [
        *first["messages"],
        CONVERSATION[0],
        {"role": "tool", "tool_call_id": "call_0", "content": "forty-two\n[exit status 3]"},
    ]
    assert third["messages"] == [
        *second["messages"],
        CONVERSATION[1],
        {"role": "tool", "tool_call_id": "call_0", "content": "ok"},
        {"role": "tool", "tool_call_id": "call_1", "content": "ü\n"},
    ]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert len(server.connections) == 1


def test_a_reply_without_calls_ends_it(server: Server, tmp_path: Path) -> None:
    server.answers = [whole(message("I give up."))]
    (tmp_path / "task.txt").write_text("From a file.")
    done = run(server, tmp_path, "--file", "task.txt")
    assert (done.returncode, done.stdout) == (0, b"I give up.\n")
    assert server.requests[0]["messages"][1]["content"] == "From a file."


def test_reasoning_goes_back_as_it_came(server: Server, tmp_path: Path) -> None:
    reply = message("x", ("bash", {"command": "true"})) | {"reasoning_content": "hmm, hmm"}
    server.answers = [streamed(reply), streamed(message("end"))]
    run(server, tmp_path, REACT_STREAM="1")
    assert server.requests[1]["messages"][2] == reply


def results(server: Server, folder: Path, *calls: tuple[str, Any], **env: str) -> list[str]:
    server.answers = [whole(message(None, *calls)), whole(message("end"))]
    done = run(server, folder, **env)
    assert done.returncode == 0, done.stderr
    return [m["content"] for m in server.requests[1]["messages"] if m["role"] == "tool"]


def test_mistakes_of_the_model_come_back_as_text(server: Server, tmp_path: Path) -> None:
    texts = results(
        server,
        tmp_path,
        ("python", {"code": "1"}),
        ("bash", '{"command": "true'),
        ("bash", "[1]"),
        ("bash", {}),
        ("bash", {"command": 5}),
        ("bash", {"command": "a\0b"}),
        ("bash", {"command": "x" * 300_000}),
        ("read_file", {"path": "no/such"}),
        ("read_file", {"path": "/dev/zero"}),
        ("write_file", {"path": "/proc/no/such", "content": ""}),
        ("write_file", {"path": "lone", "content": "\ud800"}),
        ("finish", "nonsense"),
    )
    assert all(text.startswith("error: ") for text in texts)
    assert texts[0] == (
        "error: unknown tool 'python'; the tools are bash, read_file, write_file, finish"
    )
    assert "not JSON" in texts[1]
    assert texts[2] == "error: the arguments are not a JSON object"
    assert texts[3] == "error: the argument 'command' must be a string"


def test_shell(server: Server, tmp_path: Path) -> None:
    texts = results(
        server,
        tmp_path,
        ("bash", {"command": "true"}),
        ("bash", {"command": "echo out; echo err >&2"}),
        ("bash", {"command": "kill -9 $$"}),
        ("bash", {"command": "cat; env | grep -E 'OPENAI|REACT|secret'; echo $?"}),
        ("bash", {"command": "yes | head -n 1"}),
        ("bash", {"command": "printf '\\377'"}),
    )
    assert texts == ["(no output)", "out\nerr", "[exit status 137]", "1", "y", "\ufffd"]


def test_a_command_left_behind_does_not_hold_the_turn(server: Server, tmp_path: Path) -> None:
    command = "sleep 60 & echo $! > pid; echo started"
    assert results(server, tmp_path, ("bash", {"command": command})) == ["started"]
    os.kill(int((tmp_path / "pid").read_text()), 9)  # it was alive


def test_a_command_that_hangs_is_killed_with_its_children(server: Server, tmp_path: Path) -> None:
    command = "echo begun; (echo $BASHPID > pid; sleep 60); echo never"
    texts = results(server, tmp_path, ("bash", {"command": command}), REACT_TOOL_TIMEOUT="0.5")
    assert texts == ["begun\n[killed after 0.5 s]"]
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_huge_outputs_are_cut_in_the_middle(server: Server, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"h" * 600 + b"m" * 5000 + b"t" * 600)
    texts = results(
        server,
        tmp_path,
        ("bash", {"command": "head -c 3000000 /dev/zero | tr '\\0' x; exit 1"}),
        ("read_file", {"path": "big"}),
        REACT_OUTPUT_BYTES="1000",
    )
    half = "x" * 500
    assert texts[0] == f"{half}\n[2999000 bytes left out]\n{half}\n[exit status 1]"
    assert texts[1] == "h" * 500 + "\n[5200 bytes left out]\n" + "t" * 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        error(500, "oops"),
        error(429, "slow down"),
        body(503, b"<html>"),
        raw(b""),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
    ],
)
def test_failures_in_passing_are_retried(
    server: Server, tmp_path: Path, failure: Answer, stream: bool
) -> None:
    server.answers = [failure, (streamed if stream else whole)(message("end"))]
    done = run(server, tmp_path, REACT_STREAM=str(int(stream)))
    assert (done.returncode, done.stdout) == (0, b"end\n")
    assert server.requests[0] == server.requests[1]


def test_a_stream_that_breaks_off_is_retried(server: Server, tmp_path: Path) -> None:
    server.answers = [streamed(message("half a"), end=b""), streamed(message("end"))]
    assert run(server, tmp_path, REACT_STREAM="1").stdout == b"end\n"


def test_lasting_failures_end_it(server: Server, tmp_path: Path) -> None:
    server.answers = [error(500, "oops")] * 4
    done = run(server, tmp_path)
    assert done.returncode == 4
    assert done.stderr == b"react: the API failed: HTTP 500: oops\n"
    assert not server.answers


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (error(401, "bad key"), "HTTP 401: bad key"),
        (body(200, b"garbage"), "the reply is not JSON: b'garbage'"),
        (body(200, b'{"choices": []}'), "the reply is no chat completion"),
        (body(200, b'{"choices": [{"message": {"tool_calls": [{}]}}]}'), "no chat completion"),
        (body(200, b"[1, 2]"), "the reply is no chat completion"),
        (body(200, b'{"choices": [{"message": []}]}'), "the reply is no chat completion"),
        (raw(b"SSH-2.0-OpenSSH_9.2\r\n"), "does not speak HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}"), "bad length"),
        (raw(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000), "a header line without end"),
    ],
)
def test_garbage_ends_it_at_once(server: Server, tmp_path: Path, answer: Answer, text: str) -> None:
    server.answers = [answer]
    done = run(server, tmp_path)
    assert done.returncode == 4
    assert text in done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("event", [b"nonsense", b"7", b'{"choices": 5}', b'{"choices": [{}]}'])
def test_garbage_in_a_stream_ends_it(server: Server, tmp_path: Path, event: bytes) -> None:
    server.answers = [body(200, b"data: " + event + b"\n\n", "text/event-stream")]
    done = run(server, tmp_path, REACT_STREAM="1")
    assert done.returncode == 4
    assert b"Traceback" not in done.stderr


def test_nobody_listens(tmp_path: Path) -> None:
    done = run(Server("http://127.0.0.1:1/v1"), tmp_path)
    assert done.returncode == 4
    assert b"refused" in done.stderr


@pytest.mark.parametrize("stream", [False, True])
def test_the_rollout_limit_ends_it_without_a_retry(
    server: Server, tmp_path: Path, stream: bool
) -> None:
    server.answers = [error(429, "the limit of 3 calls is reached", "rollout_limit")]
    done = run(server, tmp_path, REACT_STREAM=str(int(stream)))
    assert done.returncode == 3
    assert done.stderr == b"react: the limit of 3 calls is reached\n"


def test_the_rollout_limit_inside_a_stream(server: Server, tmp_path: Path) -> None:
    event = {"error": {"message": "no more", "code": "rollout_limit"}}
    data = b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
    server.answers = [body(200, data, "text/event-stream")]
    assert run(server, tmp_path, REACT_STREAM="1").returncode == 3


def test_turns_run_out(server: Server, tmp_path: Path) -> None:
    server.answers = [whole(message(None, ("bash", {"command": "echo x >> log"})))] * 2
    done = run(server, tmp_path, REACT_MAX_TURNS="2")
    assert done.returncode == 3
    assert done.stderr == b"react: no end after 2 turns\n"
    assert (tmp_path / "log").read_text() == "x\nx\n"


def test_a_connection_closed_while_idle_is_opened_anew(server: Server, tmp_path: Path) -> None:
    def answer_and_close(handler: BaseHTTPRequestHandler) -> None:
        whole(message(None, ("bash", {"command": "sleep 0.2"})))(handler)
        handler.close_connection = True  # without a word, as an idle timeout does

    server.answers = [answer_and_close, whole(message("end"))]
    assert run(server, tmp_path).stdout == b"end\n"
    assert len(server.connections) == 2


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        (("a", "b"), {}, "expected INSTRUCTION"),
        (("--file", "no-such"), {}, "cannot read the instruction"),
        (("x",), {"OPENAI_BASE_URL": "https://example.org/v1"}, "expected http://HOST[:PORT]/v1"),
        (("x",), {"OPENAI_BASE_URL": ""}, "expected http://HOST[:PORT]/v1"),
        (("x",), {"REACT_MAX_TURNS": "many"}, "REACT_MAX_TURNS is 'many'"),
        (("x",), {"REACT_TOOL_TIMEOUT": "nan"}, "expected a positive number"),
        (("x",), {"REACT_OUTPUT_BYTES": "inf"}, "expected a positive number"),
    ],
)
def test_wrong_usage(
    server: Server, tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], text: str
) -> None:
    done = run(server, tmp_path, *arguments, **env)
    assert done.returncode == 2
    assert text in done.stderr.decode()
    assert not server.requests


def test_it_imports_a_small_part_of_the_standard_library_and_nothing_else() -> None:
    imported: set[str | None] = set()
    for node in ast.walk(ast.parse(PROGRAM.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    typing_only = {"typing", "collections.abc"}
    small = {"__future__", "json", "os", "select", "signal", "socket", "sys", "time"}
    assert imported == small | typing_only


def test_start_loads_no_heavy_module(server: Server, tmp_path: Path) -> None:
    server.answers = [whole(message("end"))]
    done = subprocess.run(
        [PYTHON, "-I", "-S", "-X", "importtime", str(PROGRAM), "x"],
        env={"OPENAI_BASE_URL": server.url},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "json.decoder" in loaded
    heavy = {"http.client", "urllib.request", "urllib.parse", "ssl", "subprocess", "argparse"}
    assert not loaded & (heavy | {"typing", "email", "site", "asyncio", "encodings.idna"})
    assert not any(name.startswith("clawgym") for name in loaded)
