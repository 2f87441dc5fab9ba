"""Registers one Gymnasium id a harness; importing ``clawgym_env`` runs it.

Entry points are strings, so registering imports neither the proxy nor a harness. It knows the
harnesses' names and ids alone.
"""

from __future__ import annotations

import gymnasium as gym

ENV_IDS = {"react": "clawgym/ReAct-v0", "mini-swe-agent": "clawgym/MiniSweAgent-v0"}
"""Harness name to environment id; a test holds it against the adapters' own."""


def register_all() -> None:
    """Register the id of every harness that is not registered yet."""
    for harness, env_id in ENV_IDS.items():
        if env_id not in gym.registry:
            gym.register(
                env_id,
                entry_point="clawgym_env.env:HarnessEnv",
                vector_entry_point="clawgym_env.vector:HarnessVectorEnv",
                # What a harness does between two calls depends on time and on the machine.
                nondeterministic=True,
                # Gymnasium's passive checker cannot go on after a reset that raised, as one does
                # where a harness does not start.
                disable_env_checker=True,
                kwargs={"harness": harness},
            )
