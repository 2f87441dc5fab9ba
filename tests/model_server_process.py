"""A model server in a process of its own: our proxy with a policy that repeats what it was told.

Prints its URL and key, and serves until it is terminated.
"""

from __future__ import annotations

import asyncio

from clawgym_env.calls import PolicyRequest
from clawgym_env.policies import FunctionPolicy
from clawgym_env.proxy import Proxy, Session


async def main() -> None:
    def repeat(request: PolicyRequest) -> str:
        return f"you said {request.call.messages[-1].text}"

    async with Proxy() as proxy:
        key = proxy.register(Session("server", FunctionPolicy(repeat), models=("*",)))
        print(proxy.url, key, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
