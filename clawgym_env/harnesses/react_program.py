"""ReAct, a small tool-calling agent in one file: ask the model, run its tools, ask again.

    python3 -I -S react_program.py INSTRUCTION
    python3 -I -S react_program.py --file INSTRUCTION_FILE

It speaks OpenAI Chat Completions over plain HTTP and needs nothing but the standard library. It
does not know who answers: no module of the environment suite is imported, and the sole contact is
the base URL. The conversation only ever grows: what was sent once is sent again byte for byte.

Environment:
    OPENAI_BASE_URL      where the API is, ending in /v1 (required; http only)
    OPENAI_API_KEY       the bearer token
    OPENAI_MODEL         the model name to ask for
    REACT_MAX_TURNS      model calls before it gives up (default 50)
    REACT_STREAM         1 to ask for streamed replies
    REACT_TOOL_TIMEOUT   seconds that one shell command may take (default 60)
    REACT_OUTPUT_BYTES   how much of a tool's output the model sees (default 8192)

Exit status: 0 the model finished, or replied without a tool call (the answer is on stdout); 2 wrong
usage; 3 a limit on turns ended it; 4 the API failed. The reason for 2 to 4 is on stderr.

Start-up is most of a short rollout's cost, so the imports are few and the HTTP client is its own:
http.client alone would double the CPU time until the first request.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

TYPE_CHECKING = False  # the typing module would cost a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

SYSTEM = "Solve the task with the tools, then call finish."
BACKOFF_S = (0.2, 0.5, 1.0)  # one retry after each
MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024


def _tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("bash", "Run a command.", "command"),
    _tool("read_file", "Read a file.", "path"),
    _tool("write_file", "Write a file.", "path", "content"),
    _tool("finish", "End the task.", "answer"),
]


class ApiError(Exception):
    """The API answered with an error, or with something that is no chat completion."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class RolloutLimitError(ApiError):
    """The API says that no more calls will be served."""


class ToolError(Exception):
    """A tool call could not be carried out; the text goes to the model."""


# --- HTTP -----------------------------------------------------------------------------------------


class Connection:
    """One keep-alive HTTP/1.1 connection that posts JSON."""

    def __init__(self, base_url: str, api_key: str) -> None:
        scheme, _, rest = base_url.partition("://")
        authority, _, path = rest.rstrip("/").partition("/")
        host, colon, port = authority.rpartition(":")
        if not colon or authority.endswith("]"):
            host, port = authority, "80"
        if scheme != "http" or not host or not port.isdigit():
            usage(f"OPENAI_BASE_URL is {base_url!r}; expected http://HOST[:PORT]/v1")
        # As bytes: a text host would be run through the IDNA codec, which is slow to import.
        self._address = (host.strip("[]").encode(), int(port))
        self._path = f"/{path}" if path else ""
        self._head = (
            f"Host: {authority}\r\nAuthorization: Bearer {api_key}\r\n"
            "Content-Type: application/json\r\n"
        )
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._last = False  # the server closes after this response

    def post(self, path: str, body: bytes) -> tuple[int, Iterator[bytes]]:
        """Send a request; give the status and an iterator over the body, to be read to its end."""
        sock = self._open()
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        )
        sock.sendall(head.encode() + body)
        version, _, rest = self._line().partition(b" ")
        status = rest[:3]
        if not version.startswith(b"HTTP/1.") or not status.isdigit():
            raise ApiError(f"the server does not speak HTTP: {version + b' ' + rest!r:.200}")
        headers: dict[bytes, bytes] = {}
        while line := self._line():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
            if len(headers) > 200:
                raise ApiError("the server sent more than 200 header lines")
        self._last = version == b"HTTP/1.0" or headers.get(b"connection", b"").lower() == b"close"
        return int(status), self._body(headers)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def _open(self) -> socket.socket:
        if self._buffer:
            self.close()
        if self._socket is not None:
            # Bytes or an end of file before the request: the server closed the idle connection.
            self._socket.setblocking(False)
            try:
                self._socket.recv(1)
                self.close()
            except BlockingIOError:
                self._socket.setblocking(True)
            except OSError:
                self.close()
        if self._socket is None:
            self._socket = socket.create_connection(self._address)  # type: ignore[arg-type]
        return self._socket

    def _fill(self) -> bool:
        assert self._socket is not None
        data = self._socket.recv(65536)
        self._buffer += data
        return bool(data)

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ApiError("the server sent a header line without end")
            if not self._fill():
                raise ConnectionError("the server closed the connection")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.rstrip(b"\r")

    def _take(self, size: int) -> Iterator[bytes]:
        while size:
            if not self._buffer and not self._fill():
                raise ConnectionError("the server closed the connection in mid-reply")
            data, self._buffer = self._buffer[:size], self._buffer[size:]
            size -= len(data)
            yield data

    def _body(self, headers: dict[bytes, bytes]) -> Iterator[bytes]:
        try:
            if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
                while size := int(self._line().partition(b";")[0], 16):
                    yield from self._take(size)
                    self._line()
                while self._line():
                    pass
            elif b"content-length" in headers:
                yield from self._take(int(headers[b"content-length"]))
            else:
                self._last = True
                while self._buffer or self._fill():
                    data, self._buffer = self._buffer, b""
                    yield data
        except ValueError as error:
            raise ApiError(f"the server sent a bad length: {error}") from None
        if self._last:
            self.close()


# --- the model ------------------------------------------------------------------------------------


class Model:
    """Chat completions with retries; turns whatever the server sends into a message or ApiError."""

    def __init__(self, connection: Connection, model: str, *, stream: bool) -> None:
        self._connection = connection
        self._model = model
        self._stream = stream

    def reply(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The assistant's message that follows."""
        request: dict[str, Any] = {"model": self._model, "messages": messages, "tools": TOOLS}
        if self._stream:
            request["stream"] = True
        body = json.dumps(request).encode()
        for pause in (*BACKOFF_S, None):
            try:
                return self._ask(body)
            except (ApiError, OSError) as error:
                self._connection.close()
                if pause is None or (isinstance(error, ApiError) and not error.retry):
                    raise
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _ask(self, body: bytes) -> dict[str, Any]:
        status, chunks = self._connection.post("/chat/completions", body)
        if status != 200:
            raise _api_error(status, _whole(chunks))
        try:
            if self._stream:
                return _message(_merge(_events(chunks)))
            return _message(_json(_whole(chunks))["choices"][0]["message"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ApiError(f"the reply is no chat completion: {error!r:.200}") from None


def _whole(chunks: Iterator[bytes]) -> bytes:
    body = bytearray()
    for chunk in chunks:
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the reply is longer than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ApiError(f"the reply is not JSON: {text!r:.200}") from None


def _api_error(status: int, body: bytes) -> ApiError:
    try:
        error = json.loads(body)["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = repr(body[:200]), None
    if code == "rollout_limit":
        return RolloutLimitError(str(message))
    return ApiError(f"HTTP {status}: {message}", retry=status == 429 or status >= 500)


def _events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, until ``[DONE]``; comments are keep-alives."""
    pending, done = b"", False
    for chunk in chunks:
        pending += chunk
        if len(pending) > MAX_BODY_BYTES:
            raise ApiError(f"an event is longer than {MAX_BODY_BYTES} bytes")
        *lines, pending = pending.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or done:
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                done = True  # the rest of the body is still read, to keep the connection usable
            else:
                yield _json(text)
    if not done:
        raise ConnectionError("the stream ended without [DONE]")


def _merge(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a stream add up to."""
    message: dict[str, Any] = {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if "error" in event:
            raise _api_error(500, json.dumps(event).encode())
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(
                    part["index"], {"id": None, "function": {"name": "", "arguments": ""}}
                )
                call["id"] = part.get("id") or call["id"]
                for key, piece in part.get("function", {}).items():
                    call["function"][key] += piece or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The assistant message as it goes back into the conversation."""
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if message.get("reasoning_content"):
        kept["reasoning_content"] = message["reasoning_content"]
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not (isinstance(name, str) and isinstance(arguments, str)):
            raise TypeError("name and arguments of a tool call are strings")
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call["id"], "type": "function", "function": function})
    if calls:
        kept["tool_calls"] = calls
    return kept


# --- tools ----------------------------------------------------------------------------------------


class Clip:
    """Keeps the head and the tail of what is written to it, in bounded memory."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = b""
        self._tail = b""
        self._size = 0

    def write(self, data: bytes) -> None:
        """Take the next bytes."""
        self._size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-self._half :]

    def text(self) -> str:
        """What was kept, with a mark where bytes were left out."""
        left_out = self._size - len(self._head) - len(self._tail)
        if not left_out:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n[{left_out} bytes left out]\n{tail}"


class Tools:
    """The tools, working in the current directory."""

    def __init__(self, *, timeout_s: float, output_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._output_bytes = output_bytes
        self._by_name: dict[str, Callable[[dict[str, Any]], str]] = {
            "bash": self._bash,
            "read_file": self._read_file,
            "write_file": self._write_file,
        }

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """The tool's result, or the text of what went wrong."""
        try:
            if name not in self._by_name:
                raise ToolError(f"unknown tool {name!r}; the tools are {', '.join(names())}")
            return self._by_name[name](arguments)
        except (ToolError, OSError, ValueError) as error:
            return f"error: {error}"

    def _bash(self, arguments: dict[str, Any]) -> str:
        command = _string(arguments, "command")
        clip = Clip(self._output_bytes)
        status = run_shell(command, self._timeout_s, clip.write)
        lines = [clip.text().rstrip("\n")]
        if status is None:
            lines.append(f"[killed after {self._timeout_s:g} s]")
        elif status:
            lines.append(f"[exit status {status}]")
        return "\n".join(line for line in lines if line) or "(no output)"

    def _read_file(self, arguments: dict[str, Any]) -> str:
        path = _string(arguments, "path")
        if not os.path.isfile(path):  # a FIFO or a device would have no end
            raise ToolError(f"no file {path!r}")
        clip = Clip(self._output_bytes)
        with open(path, "rb") as file:
            while data := file.read(65536):
                clip.write(data)
        return clip.text()

    def _write_file(self, arguments: dict[str, Any]) -> str:
        path, content = _string(arguments, "path"), _string(arguments, "content")
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(content.encode())
        return "ok"


def names() -> list[str]:
    """The tools' names."""
    return [tool["function"]["name"] for tool in TOOLS]


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call.

    Raises:
        ToolError: The text is not a JSON object.
    """
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        raise ToolError(f"the arguments are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError("the arguments are not a JSON object")
    return arguments


def _string(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"the argument {name!r} must be a string")
    return value


def run_shell(command: str, timeout_s: float, write: Callable[[bytes], None]) -> int | None:
    """Run a command in a process group of its own, output and errors as one.

    Returns once the shell has ended, even if something it left in the background still holds the
    output open. By posix_spawn: subprocess would cost four milliseconds of import.

    Returns:
        The exit status, 128 + N for death by signal N, or None when the time ran out (the whole
        group is killed then).
    """
    import select
    import signal

    shell = "/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "REACT_"))}
    output, child_end = os.pipe()
    try:
        pid = os.posix_spawn(
            shell,
            [shell, "-c", command],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, child_end, 1),
                (os.POSIX_SPAWN_DUP2, child_end, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores both, and it is inherited
        )
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(child_end)
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(output, select.POLLIN)
    poll.register(ended, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    timed_out = False
    while True:
        ready = {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        if output in ready:
            data = os.read(output, 65536)  # all that a full pipe holds
            write(data)
            if not data:
                poll.unregister(output)
        if ended in ready:
            break
        if time.monotonic() >= deadline:
            timed_out = True
            os.killpg(pid, signal.SIGKILL)
            break
    _, status = os.waitpid(pid, 0)
    os.close(output)
    os.close(ended)
    code = os.waitstatus_to_exitcode(status)
    return None if timed_out else 128 - code if code < 0 else code


# --- the loop -------------------------------------------------------------------------------------


def converse(instruction: str, model: Model, tools: Tools, max_turns: int) -> str | None:
    """Talk until the model finishes; the answer, or None when the turns ran out."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": instruction},
    ]
    for _ in range(max_turns):
        message = model.reply(messages)
        messages.append(message)
        if "tool_calls" not in message:
            return str(message["content"] or "")
        for call in message["tool_calls"]:
            name = call["function"]["name"]
            try:
                arguments = parse_arguments(call["function"]["arguments"])
                if name == "finish":
                    return str(arguments.get("answer", ""))
                result = tools.run(name, arguments)
            except ToolError as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return None


def usage(message: str) -> NoReturn:
    """Say what is wrong with the command line or the environment, and end."""
    print(f"react: {message}", file=sys.stderr)
    raise SystemExit(2)


def setting(name: str, default: float) -> float:
    """A positive number from the environment."""
    text = os.environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        usage(f"{name} is {text!r}; expected a positive number")
    return value


def instruction_from(arguments: list[str]) -> str:
    """The instruction that the command line gives or names."""
    if len(arguments) == 1 and arguments[0] != "--file":
        return os.fsencode(arguments[0]).decode("utf-8", "replace")
    if len(arguments) == 2 and arguments[0] == "--file":
        try:
            with open(arguments[1], encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError) as error:
            usage(f"cannot read the instruction: {error}")
    usage("expected INSTRUCTION, or --file PATH")


def main() -> int:
    """Run the agent as the command line and the environment say."""
    instruction = instruction_from(sys.argv[1:])
    connection = Connection(
        os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
    )
    stream = os.environ.get("REACT_STREAM", "") not in ("", "0")
    model = Model(connection, os.environ.get("OPENAI_MODEL", "default"), stream=stream)
    tools = Tools(
        timeout_s=setting("REACT_TOOL_TIMEOUT", 60),
        output_bytes=int(setting("REACT_OUTPUT_BYTES", 8192)),
    )
    max_turns = max(1, int(setting("REACT_MAX_TURNS", 50)))
    try:
        answer = converse(instruction, model, tools, max_turns)
    except RolloutLimitError as error:
        print(f"react: {error}", file=sys.stderr)
        return 3
    except (ApiError, OSError) as error:
        print(f"react: the API failed: {error}", file=sys.stderr)
        return 4
    if answer is None:
        print(f"react: no end after {max_turns} turns", file=sys.stderr)
        return 3
    sys.stdout.buffer.write(answer.encode("utf-8", "replace") + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
