"""Task sets of a few lines for tests, as a user plugs them in: ``small_tasks:echo``."""

from __future__ import annotations

from clawgym_env.calls import Move
from clawgym_env.tasks import Task, TaskLimits, Verifier

VERIFY = """
import os
path = os.path.join(os.environ["CLAWGYM_WORKSPACE"], "reply.txt")
text = open(path).read() if os.path.exists(path) else ""
"""


def task(name: str, verify: str, wall_s: float = 20.0, max_calls: int = 4) -> Task:
    return Task(
        name,
        f"do {name}",
        {"given.txt": b"given\n"},
        Verifier(("{python}", "verify.py"), {"verify.py": (VERIFY + verify).encode()}, 2.0),
        TaskLimits(max_calls=max_calls, wall_s=wall_s),
        (Move("finish", content="yes"),),
    )


def echo() -> list[Task]:
    """Reward 1 where the reply is ``yes``."""
    return [task(f"echo-{i}", "print(float(text == 'yes'))") for i in range(8)]


def even() -> list[Task]:
    """Reward 1 where the reply has an even number of characters."""
    return [task(f"even-{i}", "print(float(len(text) % 2 == 0))") for i in range(8)]


def naps() -> list[Task]:
    """For ``Naps``."""
    return [task("nap-short", "print(1.0)"), task("nap-long", "print(1.0)", wall_s=90.0)]


def short() -> list[Task]:
    """A second of wall time."""
    return [task("short-0", "print(1.0)", wall_s=1.0)]


def broken() -> list[Task]:
    """Verifiers that give no score, each in its own way."""
    return [
        task("crash", "raise SystemExit(3)"),
        task("hang", "import time; time.sleep(60)"),
        task("nothing", ""),
        task("words", "print('well done')"),
        task("nan", "print('nan')"),
        task("large", "print(2.0)"),
        task("flood", "while True: print('x' * 65536)"),
    ]
