"""``clawgym proxy``: capture any program's model calls, without a harness or a task."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import time
import uuid
from pathlib import Path
from typing import Annotated

import typer

from clawgym_env.calls import CapturedCall, Outcome, Rollout
from clawgym_env.errors import ConfigError


def proxy(
    upstream: Annotated[
        str, typer.Option(help="API root of the OpenAI-compatible server that answers.")
    ],
    store: Annotated[
        Path, typer.Option(envvar="CLAWGYM_STORE", help="Keep the calls in this store.")
    ] = Path("clawgym.db"),
    upstream_model: Annotated[
        str | None, typer.Option(help="Model to ask upstream; default: the one asked for.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    key: Annotated[
        str | None,
        typer.Option(envvar="CLAWGYM_KEY", help="Key that the program sends; default: a new one."),
    ] = None,
) -> None:
    """Serve a model API that forwards to another server and captures every call.

    The upstream's key is read from UPSTREAM_API_KEY, so that it is on no command line.
    """
    if not upstream.startswith(("http://", "https://")):
        raise ConfigError(f"--upstream is a URL such as http://127.0.0.1:8001/v1; got {upstream!r}")
    asyncio.run(_serve(upstream, upstream_model, store, host, port, key))


async def _serve(
    upstream: str, model: str | None, path: Path, host: str, port: int, key: str | None
) -> None:
    from clawgym_env.policies import OpenAICompatiblePolicy
    from clawgym_env.proxy import Proxy, Session
    from clawgym_env.store import CaptureStore

    policy = OpenAICompatiblePolicy(upstream, os.environ.get("UPSTREAM_API_KEY", ""), model)
    rollout_id = uuid.uuid4().hex

    def show(call: CapturedCall) -> None:
        reply = call.completion
        tools = ", ".join(t.name for t in reply.message.tool_calls)
        print(
            f"call {call.call.index}: {len(call.call.messages)} messages -> "
            f"{reply.finish_reason} {tools or repr(reply.message.text[:60])}"
            f"{'' if call.delivered else ' (undelivered)'}",
            flush=True,
        )

    session = Session(
        rollout_id=rollout_id, policy=policy, models=("*",), on_call=show, retain=False
    )
    key = key or secrets.token_urlsafe(24)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with CaptureStore(path) as store:
        record = Rollout(
            rollout_id=rollout_id,
            task_id="proxy",
            harness="proxy",
            outcome=Outcome.CANCELLED,
            started_at=time.time(),
            metadata={"upstream": upstream},
        )
        store.begin_rollout(record)
        async with contextlib.AsyncExitStack() as stack:
            server = Proxy(store)
            stack.push_async_callback(policy.close)
            stack.push_async_callback(server.close)
            await server.start(host, port)
            server.register(session, key)
            print(f"capturing into {path}, rollout {rollout_id[:12]}; point the program at")
            print(f"  OPENAI_BASE_URL={server.url}/v1")
            print(f"  OPENAI_API_KEY={key}")
            print("and stop with Ctrl-C", flush=True)
            await stop.wait()
            await server.seal(rollout_id)
        captured = store.rollout(rollout_id)
        store.finish_rollout(
            dataclasses.replace(captured, outcome=Outcome.COMPLETED, finished_at=time.time())
        )
    kept = len(captured.calls)
    failed = f", {session.calls - kept} failed" if session.calls > kept else ""
    print(f"\n{kept} calls captured{failed}; look at them with:")
    print(f"  clawgym trace show {rollout_id[:12]} --store {path} --messages")
