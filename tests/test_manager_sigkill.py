import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from test_env import processes_under

from clawgym_env.calls import CapturedCall
from clawgym_env.rooms import sweep
from clawgym_env.store import CaptureStore

PROGRAM = Path(__file__).with_name("manager_to_kill.py")
ROLLOUTS = 50


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
def test_every_reply_received_is_in_the_store_once(
    sandbox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager is killed at random moments until 50 rollouts have been under way."""
    room = tmp_path / "tmp"
    room.mkdir()
    for path in (tmp_path, room):
        path.chmod(0o711)
    monkeypatch.setattr("tempfile.tempdir", str(room))
    rng = random.Random(sandbox)
    store = tmp_path / "captures.db"
    received: Counter[str] = Counter()
    begun = kills = 0
    while begun < ROLLOUTS or len(received) < ROLLOUTS:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(store), sandbox, str(ROLLOUTS)],
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(room)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        time.sleep(rng.uniform(0.05, 1.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        kills += 1
        wait_until_gone(room)
        # A verifier's sandbox, named after the rollout's with -v behind, holds a copy.
        logs = [p for p in room.glob("clawgym-*/**/received.log") if "-v/" not in str(p)]
        received.update(line for log in logs for line in log.read_text().split())
        with CaptureStore(store, read_only=True) as opened:
            begun = len(opened.summaries())
        assert sweep() and not list(room.glob("clawgym-*"))
    assert kills > 1
    assert max(received.values()) == 1

    kept: Counter[str] = Counter()
    with CaptureStore(store, read_only=True) as opened:
        for row in opened.summaries():
            kept.update(mark(call) for call in opened.rollout(row.rollout_id).calls)
    missing = set(received) - set(kept)
    assert not missing, f"received and not stored: {sorted(missing)[:5]}"
    assert {kept[name] for name in received} == {1}


def mark(call: CapturedCall) -> str:
    (tool,) = call.completion.message.tool_calls
    command = str(json.loads(tool.arguments).get("command", "finish"))
    return command.split()[1] if command.startswith("echo") else f"finish-{call.call.call_id}"


def wait_until_gone(room: Path) -> None:
    deadline = time.monotonic() + 20
    while left := processes_under(room):
        assert time.monotonic() < deadline, f"processes outlive their manager: {left}"
        time.sleep(0.02)
