"""Harnesses of a few lines for tests: well-behaved ones, and ones that fail in a known way.

Adapters of the kind that a user writes: ``small_harnesses:Echo`` names one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clawgym_env.calls import Message, Move
from clawgym_env.harnesses import Endpoint, Harness, LaunchPlan

ASK = r"""
import json, os, socket, sys
def ask(text):
    body = json.dumps({"model": os.environ["MODEL"],
                       "messages": [{"role": "user", "content": text}]}).encode()
    host, port = os.environ["URL"].split("//")[1].split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
                  b"Authorization: Bearer " + os.environ["KEY"].encode() +
                  b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        data = b""
        while block := s.recv(65536):
            data += block
    return json.loads(data.split(b"\r\n\r\n", 1)[1])["choices"][0]["message"]["content"]
"""


class _Small(Harness):
    protocols = ("openai_chat",)
    program = ""

    def version(self) -> str | None:
        return "0"

    def install(self, progress: Callable[[str], None]) -> None:
        progress("nothing to install")

    def remove(self) -> None:
        pass

    def launch(
        self,
        instruction: str,
        endpoint: Endpoint,
        *,
        python: str,
        workspace_path: str,
        home_path: str,
        max_calls: int,
    ) -> LaunchPlan:
        return LaunchPlan(
            argv=(python, "-I", "-S", f"{home_path}/program.py", instruction),
            env={"URL": endpoint.base_url, "KEY": endpoint.api_key, "MODEL": endpoint.model},
            files={"program.py": (ASK + self.program).encode()},
        )

    def script(self, moves: Sequence[Move]) -> tuple[Message, ...]:
        return tuple(Message("assistant", move.content) for move in moves)


class Echo(_Small):
    """Asks once and writes the reply to reply.txt."""

    name, title = "echo", "Echo"
    program = "open('reply.txt', 'w').write(ask(sys.argv[1]))"


class Parallel(_Small):
    """Asks three questions at once and writes the replies in order."""

    name, title = "parallel", "Parallel"
    program = r"""
import threading
out = [None] * 3
def one(i): out[i] = ask(f"question {i}")
threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
[t.start() for t in threads]; [t.join() for t in threads]
open("reply.txt", "w").write("|".join(out))
"""


class Naps(_Small):
    """Asks, then sleeps as long as its instruction says."""

    name, title = "naps", "Naps"
    program = "import time; ask('hi'); time.sleep(60 if 'long' in sys.argv[1] else 0)"


class FailsOnEcho1(_Small):
    """Fails to start on one task."""

    name, title = "failsonecho1", "FailsOnEcho1"
    program = """
if "echo-1" in sys.argv[1]: sys.exit(9)
open("reply.txt", "w").write(ask(sys.argv[1]))
"""


class ExitsAtOnce(_Small):
    name, title = "exits", "Exits"
    program = "sys.stderr.write('no such option: --headless'); sys.exit(7)"


class Silent(_Small):
    """Ends well without ever asking."""

    name, title = "silent", "Silent"
    program = "sys.exit(0)"


class LaunchRaises(_Small):
    name, title = "launchraises", "LaunchRaises"

    def launch(self, instruction: str, endpoint: Endpoint, **where: object) -> LaunchPlan:
        raise ValueError("no such flag")


class LaunchesNothing(_Small):
    name, title = "launchesnothing", "LaunchesNothing"

    def launch(self, instruction: str, endpoint: Endpoint, **where: object) -> LaunchPlan:
        return None  # type: ignore[return-value]


class Unfinished(Harness):
    """Lacks every method."""


class Hangs(_Small):
    """Asks once and then hangs."""

    name, title = "hangs", "Hangs"
    program = "import time; ask('hello'); time.sleep(3600)"


class HangsAtOnce(_Small):
    name, title = "hangsatonce", "HangsAtOnce"
    program = "import time; time.sleep(3600)"


class Crashes(_Small):
    """Asks once and dies with a traceback."""

    name, title = "crashes", "Crashes"
    program = "ask('hello'); raise RuntimeError('out of ideas')"


class Garbage(_Small):
    """Prints bytes that are no text."""

    name, title = "garbage", "Garbage"
    program = "ask('hello'); os.write(1, bytes(range(256)) * 100); os.write(2, b'\\xff' * 1000)"


class Floods(_Small):
    """Asks once and floods stdout."""

    name, title = "floods", "Floods"
    program = "ask('hello')\nwhile True: os.write(1, b'y' * 65536)"


class Daemon(_Small):
    """Leaves a process that left its session and would rewrite the workspace for ever."""

    name, title = "daemon", "Daemon"
    program = r"""
ask("hello")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        while True:
            open("late.txt", "a").write("late\n"); time.sleep(0.01)
    os._exit(0)
import time; time.sleep(0.2)
"""


class Insists(_Small):
    """Asks for ever, whatever it is told."""

    name, title = "insists", "Insists"
    program = r"""
import time
while True:
    try: ask("again")
    except Exception: time.sleep(0.05)
"""
