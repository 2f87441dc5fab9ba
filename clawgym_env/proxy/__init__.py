"""The model server that harnesses talk to: it attributes, answers, captures.

It joins the wire protocols, the renderer, the policies and the store, and knows nothing of
harnesses, sandboxes, tasks or rewards. Invariant: a reply is in the store before a byte of it
leaves.
"""

from __future__ import annotations

from clawgym_env.proxy.proxy import MAX_BODY, Proxy
from clawgym_env.proxy.session import Session

__all__ = ["MAX_BODY", "Proxy", "Session"]
