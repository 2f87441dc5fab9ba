"""Managers that are there to be killed: each a proxy with a store, until the signal comes.

Run as ``python killed_manager.py STORE``. For each rollout id on standard input it forks a manager,
which saves the imports, and that one prints its process id and its proxy's URL and key.
"""

import asyncio
import os
import signal
import sys

from clawgym_env.calls import Message, Outcome, PolicyRequest, Rollout
from clawgym_env.policies import FunctionPolicy
from clawgym_env.proxy import Proxy, Session
from clawgym_env.store import CaptureStore


async def reply(request: PolicyRequest) -> Message:
    # Some replies come at once and some while other calls arrive; some are long.
    await asyncio.sleep((request.call.index % 3) * 0.001)
    said = request.call.messages[-1].text
    return Message("assistant", f"reply to {said} " + "x" * (request.call.index % 5 * 20_000))


async def main(path: str, rollout_id: str) -> None:
    store = CaptureStore(path)
    store.begin_rollout(Rollout(rollout_id, "task", "test", Outcome.CANCELLED))
    proxy = Proxy(store)
    await proxy.start()
    key = proxy.register(Session(rollout_id, FunctionPolicy(reply)))
    print(os.getpid(), proxy.url, key, flush=True)
    await asyncio.Event().wait()


signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need no waiting for
for line in sys.stdin:
    if os.fork() == 0:
        asyncio.run(main(sys.argv[1], line.strip()))
