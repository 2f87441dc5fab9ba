"""A model server for tests: real HTTP on loopback, each request answered by the next answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from clawgym_env.calls import Message

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Server:
    url: str
    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)


@contextmanager
def serve() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            record.requests.append({"path": self.path, **json.loads(body)})
            record.headers.append(dict(self.headers))
            record.connections.add(self.client_address)
            record.answers.pop(0)(self)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        record = Server(f"http://127.0.0.1:{http.server_port}/v1")
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield record
        finally:
            http.shutdown()
            thread.join()


def body(status: int, data: bytes, kind: str = "application/json") -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def error(status: int, message: str, code: str | None = None) -> Answer:
    return body(status, json.dumps({"error": {"message": message, "code": code}}).encode())


def raw(data: bytes) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return answer


def message(content: str | None = None, *calls: tuple[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        reply["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": given if isinstance(given, str) else json.dumps(given),
                },
            }
            for index, (name, given) in enumerate(calls)
        ]
    return reply


def whole(reply: dict[str, Any]) -> Answer:
    choice = {"index": 0, "message": reply, "finish_reason": "stop"}
    fields = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return body(200, json.dumps({**fields, "choices": [choice], "usage": usage}).encode())


def script(messages: Sequence[Message]) -> list[Answer]:
    """Answers that send the messages, one a request."""
    return [
        whole(message(m.content, *((c.name, c.arguments) for c in m.tool_calls)))  # type: ignore[arg-type]
        for m in messages
    ]
