"""Runs rollouts until it is killed; started by test_manager_sigkill.py.

Each reply makes the harness write a mark of its own into its workspace, so the workspaces tell
which replies reached a harness.
"""

from __future__ import annotations

import asyncio
import sys
import uuid

from clawgym_env.calls import Move, Rollout
from clawgym_env.harnesses import get_harness
from clawgym_env.policies import ScriptedPolicy
from clawgym_env.runtime import Runtime, RuntimeSettings
from clawgym_env.tasks import load_tasks

CALLS = 6


def main(store: str, sandbox: str, rollouts: int) -> None:
    harness = get_harness("react")
    tasks = load_tasks("key_lookup:level=1")
    with Runtime(RuntimeSettings(sandbox=sandbox, store=store, max_live=8)) as runtime:

        async def one(index: int) -> Rollout:
            name = uuid.uuid4().hex
            moves = [Move("shell", f"echo {name}:{n} >> received.log") for n in range(CALLS)]
            policy = ScriptedPolicy(harness.script(moves))
            return await runtime.manager.run(tasks[index], harness, policy, rollout_id=name)

        async def all_of_them() -> None:
            for done in asyncio.as_completed([one(i) for i in range(rollouts)]):
                print((await done).rollout_id, flush=True)

        print("started", flush=True)
        runtime.call(all_of_them())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
