"""The capture store: every model call of every rollout, durable and token-exact.

``capture`` is the store itself, ``database`` opens its file, ``rows`` turns dataclasses into
columns and back, ``records`` fields into compact bytes and back, and ``lineage`` finds the earlier
call that a new one repeats most of. Nothing here knows wire protocols, tokenizers, policies,
harnesses or keys.
"""

from clawgym_env.store.capture import CaptureStore
from clawgym_env.store.rows import UNFINISHED, RolloutSummary

__all__ = ["UNFINISHED", "CaptureStore", "RolloutSummary"]
