"""Adapter of ReAct, the small reference harness that ships with the suite.

The program is ``react_program.py`` beside this file. It is copied into the sandbox's home and run
there by the system's Python, so it sees no module of the suite.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from clawgym_env.calls import Message, Move, ToolCall
from clawgym_env.harnesses.base import Endpoint, Harness, LaunchPlan

VERSION = "1"
"""Changes whenever the program's prompts, tools or replies to the model change."""

PROGRAM = Path(__file__).with_name("react_program.py")


class ReAct(Harness):
    """A tool-calling loop with ``bash``, ``read_file``, ``write_file`` and ``finish``."""

    name = "react"
    title = "ReAct"
    protocols = ("openai_chat",)

    def version(self) -> str | None:
        """The program's version, which is part of the suite and always installed."""
        return VERSION

    def install(self, progress: Callable[[str], None]) -> None:
        """Nothing to do: the program is part of the suite."""
        progress("react is part of clawgym; there is nothing to install")

    def remove(self) -> None:
        """Nothing to do: the program is part of the suite."""

    def launch(
        self,
        instruction: str,
        endpoint: Endpoint,
        *,
        python: str,
        workspace_path: str,
        home_path: str,
        max_calls: int,
    ) -> LaunchPlan:
        """Run the program on the instruction, which it reads from a file in its home."""
        # -I -S: no site packages and no user settings, for a fast start and an equal one anywhere.
        argv = (python, "-I", "-S", f"{home_path}/react.py", "--file", f"{home_path}/task.txt")
        return LaunchPlan(
            argv=argv,
            env={
                "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
                "OPENAI_API_KEY": endpoint.api_key,
                "OPENAI_MODEL": endpoint.model,
                "REACT_MAX_TURNS": str(max_calls + 1),
            },
            files={"react.py": _program(), "task.txt": instruction.encode()},
        )

    def script(self, moves: Sequence[Move]) -> tuple[Message, ...]:
        """One tool call a move."""
        replies = [self._call(index, move) for index, move in enumerate(moves)]
        if not moves or moves[-1].kind != "finish":
            replies.append(self._call(len(replies), Move("finish", content="done")))
        return tuple(replies)

    def _call(self, index: int, move: Move) -> Message:
        if move.kind == "shell":
            name, arguments = "bash", {"command": move.command}
        elif move.kind == "write":
            name, arguments = "write_file", {"path": move.path, "content": move.content}
        else:
            name, arguments = "finish", {"answer": move.content}
        text = json.dumps(arguments, ensure_ascii=False)
        return Message("assistant", tool_calls=(ToolCall(f"call_{index}", name, text),))


@cache
def _program() -> bytes:
    return PROGRAM.read_bytes()
