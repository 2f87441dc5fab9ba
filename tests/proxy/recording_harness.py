"""A harness that writes down every reply it received, the moment it has it.

Run as ``python recording_harness.py FILE``. Each line of standard input is ``URL KEY``; it then
calls from four threads until the server is gone, and prints ``gone``. Standard library alone, so
that nothing of the package can help it.
"""

import http.client
import itertools
import json
import os
import sys
import threading

THREADS = 4
numbers = itertools.count()


def call(connection: http.client.HTTPConnection, key: str, record: int) -> None:
    number = next(numbers)
    said = f"question {number}"
    body = {
        "model": "clawgym",
        "messages": [{"role": "user", "content": said}],
        "stream": number % 2 == 0,
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    call_id = response.headers["x-request-id"]
    write(record, {"call_id": call_id, "said": said, "whole": False})
    raw = response.read().decode()
    if body["stream"]:
        events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            raise ConnectionError("the stream was cut")
        deltas = [json.loads(e)["choices"][0]["delta"] for e in events[:-1]]
        text = "".join(delta.get("content") or "" for delta in deltas)
    else:
        text = json.loads(raw)["choices"][0]["message"]["content"]
    write(record, {"call_id": call_id, "said": said, "whole": True, "text": text})


def write(record: int, entry: dict[str, object]) -> None:
    os.write(record, json.dumps(entry).encode() + b"\n")  # one write, so that lines stay whole


def until_gone(url: str, key: str, record: int) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        while True:
            call(connection, key, record)
    except (OSError, http.client.HTTPException):
        connection.close()


def main(path: str) -> None:
    record = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for line in sys.stdin:
        url, key = line.split()
        threads = [
            threading.Thread(target=until_gone, args=(url, key, record)) for _ in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("gone", flush=True)


main(sys.argv[1])
