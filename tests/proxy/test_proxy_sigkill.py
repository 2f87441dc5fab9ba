"""The promise of the store: whatever moment the manager dies at, no received reply is lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawgym_env.store import CaptureStore

HERE = Path(__file__).parent
ROUNDS = 15


class Program:
    """A child process that is spoken with in lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def tell(self, line: str) -> None:
        self._stdin.write(f"{line}\n")
        self._stdin.flush()

    def hear(self) -> str:
        return self._stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.hear()


@contextmanager
def program(*arguments: str | Path) -> Iterator[Program]:
    """Run a Python program of this folder (after flags) in a process group of its own."""
    *before, argument = arguments
    *flags, name = map(str, before)
    process = subprocess.Popen(
        [sys.executable, *flags, str(HERE / name), str(argument)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield Program(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_every_received_reply_is_in_the_store_once_whenever_the_manager_is_killed(
    tmp_path: Path,
) -> None:
    chance = random.Random(20240607)
    path, record = tmp_path / "captures.sqlite", tmp_path / "received.jsonl"
    with (
        program("killed_manager.py", path) as nursery,
        program("-I", "-S", "recording_harness.py", record) as harness,
    ):
        for number in range(ROUNDS):
            pid, url, key = nursery.ask(f"round-{number}").split()
            harness.tell(f"{url} {key}")
            time.sleep(chance.uniform(0.0, 0.4))
            os.kill(int(pid), signal.SIGKILL)
            assert harness.hear() == "gone"

    received = [json.loads(line) for line in record.read_text().splitlines()]
    with CaptureStore(path) as store:
        calls = [c for n in range(ROUNDS) for c in store.rollout(f"round-{n}").calls]
    stored = {c.call.call_id: c for c in calls}
    assert len(stored) == len(calls)
    for entry in received:
        captured = stored[entry["call_id"]]
        assert captured.call.messages[-1].text == entry["said"]
        if entry["whole"]:
            assert captured.completion.message.text == entry["text"]
            assert captured.delivered is not False
    whole = [entry for entry in received if entry["whole"]]
    assert len(whole) > ROUNDS, "the harness must have received enough for this to say something"
    assert len({entry["call_id"] for entry in whole}) == len(whole)
