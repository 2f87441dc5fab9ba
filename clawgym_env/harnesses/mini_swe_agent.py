"""Adapter of mini-swe-agent, the bash-only coding agent by the SWE-agent authors (PyPI).

Its loop, tool, error handling and LiteLLM client are its own. Ours are the templates of its
configuration file: short, and free of what its default ones tell of the machine, so that the same
task gives the same prompt anywhere.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from clawgym_env.calls import Message, Move, ToolCall
from clawgym_env.errors import HarnessError
from clawgym_env.harnesses.base import Endpoint, Harness, LaunchPlan
from clawgym_env.harnesses.venvs import VenvInstall

_INSTALL = VenvInstall("mini-swe-agent", "2.4.6")
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

# The program's own entry point. LiteLLM takes seconds of CPU to import; without the cyclic garbage
# collector, which finds nothing to collect there, a quarter less.
_START = (
    "import gc; gc.disable(); import litellm; gc.enable(); litellm.suppress_debug_info = True; "
    "from minisweagent.run.mini import app; app(prog_name='mini')"
)

_OBSERVATION = """\
{%- set text = output.output.rstrip('\\n') -%}
{%- if text | length > 8192 -%}
{{ text[:4096] }}
[{{ text | length - 8192 }} characters left out]
{{ text[-4096:] }}
{%- else -%}
{{ text or '(no output)' }}
{%- endif -%}
{%- if output.exception_info %}
[{{ output.exception_info }}]
{%- elif output.returncode %}
[exit status {{ output.returncode }}]
{%- endif -%}
"""


class MiniSweAgent(Harness):
    """mini-swe-agent in an environment of its own, with its LiteLLM client and tool calls."""

    name = "mini-swe-agent"
    title = "MiniSweAgent"
    protocols = ("openai_chat",)
    requirement = _INSTALL.requirement

    def version(self) -> str | None:
        """The pinned version where it is installed."""
        return _INSTALL.version if _INSTALL.installed() else None

    def install(self, progress: Callable[[str], None]) -> None:
        """Install it from the package index, about 750 MB."""
        _INSTALL.install(progress)

    def remove(self) -> None:
        """Delete its environment."""
        _INSTALL.remove()

    def mounts(self) -> tuple[tuple[Path, str], ...]:
        """Its environment, and the interpreter that this links to."""
        self.require_installed()
        return _INSTALL.mounts()

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
        """Run its command-line program without questions, by a configuration in its home."""
        self.require_installed()
        # Isolated (-I), because a workspace may hold a json.py or litellm.py of the task's.
        argv = (str(_INSTALL.python), "-I", "-c", _START, "--config", f"{home_path}/mini.yaml")
        return LaunchPlan(
            argv=(*argv, "--output", f"{home_path}/trajectory.json"),
            env={
                "OPENAI_API_BASE": f"{endpoint.base_url}/v1",
                "OPENAI_API_KEY": endpoint.api_key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_GLOBAL_CONFIG_DIR": f"{home_path}/mini",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
                "MSWEA_SILENT_STARTUP": "1",
            },
            files={"mini.yaml": _configuration(instruction, endpoint.model, workspace_path)},
        )

    def script(self, moves: Sequence[Move]) -> tuple[Message, ...]:
        """One bash call a move; final words go into the reply's text."""
        replies = [self._call(index, move) for index, move in enumerate(moves)]
        if not moves or moves[-1].kind != "finish":
            replies.append(self._call(len(replies), Move("finish")))
        return tuple(replies)

    def _call(self, index: int, move: Move) -> Message:
        content = None
        if move.kind == "shell":
            command = move.command
        elif move.kind == "write":
            command = _write_command(move)
        else:
            command, content = _SUBMIT, move.content or None
        arguments = json.dumps({"command": command}, ensure_ascii=False)
        return Message(
            "assistant", content, tool_calls=(ToolCall(f"call_{index}", "bash", arguments),)
        )


def _write_command(move: Move) -> str:
    if "\0" in move.content:
        raise HarnessError(f"a shell command cannot hold the NUL that {move.path!r} gets")
    path = PurePosixPath(move.path)
    write = f"printf %s {shlex.quote(move.content)} > {shlex.quote(str(path))}"
    if path.parent == PurePosixPath("."):
        return write
    return f"mkdir -p {shlex.quote(str(path.parent))} && {write}"


def _configuration(instruction: str, model: str, workspace_path: str) -> bytes:
    configuration: dict[str, Any] = {
        "run": {"task": instruction},
        "agent": {
            "agent_class": "default",
            "system_template": "Solve the task with the bash tool.",
            "instance_template": f"{{{{task}}}}\n\nTo end the task, run: {_SUBMIT}",
        },
        "environment": {
            "environment_class": "local",
            "cwd": workspace_path,
            # Commands get the harness' variables; the model has no business with these.
            "env": {"OPENAI_API_KEY": "", "OPENAI_API_BASE": ""},
        },
        "model": {
            "model_name": f"openai/{model}",
            "model_class": "litellm",
            "set_cache_control": None,
            "observation_template": _OBSERVATION,
            "format_error_template": "error: {{ error }}",
        },
    }
    return json.dumps(configuration, indent=1).encode()  # JSON is YAML
