import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

CLAWGYM = Path(sys.executable).with_name("clawgym")


def run(*args: str, code: int = 0, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [CLAWGYM, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200"},
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_help_lists_the_commands_of_all_packages() -> None:
    text = run("--help")
    for name in ("doctor", "rollout", "proxy", "trace", "harness", "train", "demo", "model"):
        assert name in text


def test_doctor_tells_what_works() -> None:
    text = run("doctor")
    for part in ("gymnasium", "sandbox process", "sandbox bubblewrap", "harness react", "torch"):
        assert part in text
    assert "clawgym harness install mini-swe-agent" in text or "2.4.6" in text


def test_rollout_then_trace(tmp_path: Path) -> None:
    text = run(
        "rollout", "--tasks", "key_lookup:level=2", "-n", "3", "--store", "c.db", cwd=tmp_path
    )
    assert "mean reward 1.000 over 3 scored; completed 3" in text
    shown = re.search(r"clawgym trace show (\w+) --store c.db", text)
    assert shown is not None
    assert run("trace", "list", "--store", "c.db", cwd=tmp_path).count("completed") == 3
    trace = run("trace", "show", shown[1], "--store", "c.db", "--messages", cwd=tmp_path)
    assert "finish" in trace and "-> bash(" in trace


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rollout", "--harness", "reakt"], "did you mean 'react'?"),
        (["rollout", "--tasks", "key_lokup"], "did you mean 'key_lookup'?"),
        (["rollout", "--sandbox", "bubblwrap"], "did you mean 'bubblewrap'?"),
        (["rollout", "--policy", "oracel"], "did you mean 'oracle'?"),
        (["rollout", "--policy", "openai:nowhere"], "http://HOST:PORT/v1"),
        (["harness", "install", "miniswe-agent"], "did you mean 'mini-swe-agent'?"),
        (["trace", "show", "abc", "--store", "none.db"], "none.db"),
        (["model", "get", "smolm2"], "did you mean 'smollm2'?"),
        (["train", "--resume", "--run", "nothing"], "holds no run"),
        (["train", "--model", "nowhere"], "is no directory"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], said: str, tmp_path: Path) -> None:
    text = run(*args, code=2, cwd=tmp_path)
    assert said in text and text.startswith("error: ")
    assert text.count("\n") == 1 and "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_proxy_captures_any_program(tmp_path: Path) -> None:
    """A second proxy, with an upstream of its own, stands for the model server."""
    upstream = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("model_server_process.py")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert upstream.stdout is not None
    url, key = upstream.stdout.readline().split()
    proxy = subprocess.Popen(
        [CLAWGYM, "proxy", "--upstream", f"{url}/v1", "--port", "0", "--store", "c.db"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "UPSTREAM_API_KEY": key},
    )
    assert proxy.stdout is not None
    said = {}
    while "OPENAI_API_KEY" not in said:
        name, _, value = proxy.stdout.readline().strip().partition("=")
        said[name] = value
    client = openai.OpenAI(base_url=said["OPENAI_BASE_URL"], api_key=said["OPENAI_API_KEY"])
    for stream in (False, True):
        reply = client.chat.completions.create(
            model="anything", messages=[{"role": "user", "content": "hi"}], stream=stream
        )
        if stream:
            text = "".join(c.choices[0].delta.content or "" for c in reply if c.choices)
        else:
            text = reply.choices[0].message.content
        assert text == "you said hi"
    client.close()
    proxy.send_signal(signal.SIGINT)
    out, _ = proxy.communicate(timeout=20)
    upstream.terminate()
    upstream.communicate()
    assert proxy.returncode == 0
    assert "2 calls captured" in out and said["OPENAI_API_KEY"] not in out
    listed = run("trace", "list", "--store", "c.db", cwd=tmp_path)
    assert "completed" in listed
    stored = (tmp_path / "c.db").read_bytes()
    assert said["OPENAI_API_KEY"].encode() not in stored and key.encode() not in stored


def test_import_needs_no_learning_library() -> None:
    code = (
        "import sys, clawgym_env, gymnasium; gymnasium.spec('clawgym/ReAct-v0');"
        "bad = {'torch', 'transformers', 'renderers', 'starlette'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
