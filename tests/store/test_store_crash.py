"""The process that writes is killed at random moments; nothing that it reported may be missing."""

from __future__ import annotations

import collections
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from clawgym_env.calls import Outcome
from clawgym_env.store import UNFINISHED, CaptureStore

ROUNDS = 50

# One process that has imported everything forks a writer for each line it reads.
NURSERY = """
import os, sys
from clawgym_env.calls import CapturedCall, Completion, Message, ModelCall, Outcome, Rollout
from clawgym_env.store import CaptureStore

def report(line):
    os.write(1, (line + "\\n").encode())

def write(path, name):
    store = CaptureStore(path)
    for number in range(10_000):
        rollout = Rollout(f"{name}-{number}", "t", "react", Outcome.COMPLETED, 1.0)
        store.begin_rollout(rollout)
        messages, prompt = (), tuple(range(200))
        for index in range(6):
            messages += (Message("user", f"{index} " * 300),)
            id = f"{rollout.rollout_id}/{index}"
            raw = repr(messages).encode()
            call = ModelCall(id, rollout.rollout_id, index, "openai_chat", "m", messages, raw=raw)
            reply = Completion(Message("assistant", "yes"), "stop", (index, 2), (-0.5, -0.25))
            store.commit_call(CapturedCall(call, reply, prompt))
            report(f"call {id}")
            store.mark_delivered(id, True)
            prompt += (index, 2, 7)
        store.finish_rollout(rollout)
        report(f"finished {rollout.rollout_id}")

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        write(sys.argv[1], line.strip())
    report(f"writer {pid}")
    _, status = os.waitpid(pid, 0)
    report(f"ended {os.waitstatus_to_exitcode(status)}")
"""


def killed_writer(nursery: subprocess.Popen[str], name: str, rng: random.Random) -> list[str]:
    """What a writer reported before it was killed at a random moment."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(f"{name}\n")
    nursery.stdin.flush()
    reports: list[str] = []
    pid: int | None = None
    wanted = rng.choice([0, rng.randint(1, 60)])
    while pid is None or len(reports) < wanted:
        kind, value = nursery.stdout.readline().split()
        if kind == "writer":
            pid = int(value)
        else:
            reports.append(f"{kind} {value}")
    time.sleep(rng.random() * 0.02)
    os.kill(pid, signal.SIGKILL)
    while (line := nursery.stdout.readline().strip()) != f"ended {-signal.SIGKILL}":
        assert not line.startswith("ended"), "the writer ended before it was killed"
        reports.append(line)
    return reports


def test_every_reported_call_is_in_the_store_once(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    rng = random.Random()
    reported: set[str] = set()
    finished: set[str] = set()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as nursery:
        for number in range(ROUNDS):
            for report in killed_writer(nursery, f"w{number}", rng):
                kind, name = report.split()
                (reported if kind == "call" else finished).add(name)
            with CaptureStore(path) as store:  # opens clean each time
                for rollout_id in store.rollout_ids(limit=3):
                    check(store, rollout_id)
    assert nursery.returncode == 0

    assert reported, "no writer lived long enough to report a call"
    with CaptureStore(path) as store:
        stored = collections.Counter(
            captured.call.call_id
            for rollout_id in store.rollout_ids()
            for captured in store.rollout(rollout_id).calls
        )
        assert set(store.rollout_ids(finished=True)) >= finished
    assert reported <= stored.keys()
    assert set(stored.values()) == {1}
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def check(store: CaptureStore, rollout_id: str) -> None:
    """What was begun reads back whole up to the moment of the kill."""
    rollout = store.rollout(rollout_id)
    assert rollout.outcome is Outcome.COMPLETED or rollout.detail == UNFINISHED
    (summary,) = (s for s in store.summaries() if s.rollout_id == rollout_id)
    assert summary.calls == len(rollout.calls)
    for index, captured in enumerate(rollout.calls):
        assert captured.call.call_id == f"{rollout_id}/{index}"
        assert captured.call.raw == repr(captured.call.messages).encode()
        assert captured.prompt_ids is not None
        assert len(captured.prompt_ids) == 200 + 3 * index
        assert captured.delivered in (True, None)
    if rollout.outcome is Outcome.COMPLETED:
        assert [c.delivered for c in rollout.calls] == [True] * 6
