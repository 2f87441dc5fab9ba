"""Runs a task's verifier on a frozen copy of the workspace, in a sandbox of its own.

The harness is dead by the time this runs, and the verifier's files are put where no harness ever
was. This module knows nothing of model calls. Invariant: a score comes from the verifier's own
standard output or there is none; a verifier that crashes, hangs or prints no number is a
:class:`~clawgym_env.errors.VerifierError`, never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clawgym_env.errors import VerifierError
from clawgym_env.sandboxes import Limits, Sandbox, SandboxBackend
from clawgym_env.tasks import Task, VerifierResult, parse_score

VERIFIER_FOLDER = "verifier"
OUTPUT_KB = 1024


async def score(
    task: Task,
    harness_sandbox: Sandbox,
    backend: SandboxBackend,
    *,
    sandbox_id: str,
    root: Path,
) -> VerifierResult:
    """Score what the harness left behind.

    Args:
        task: The task, whose verifier runs.
        harness_sandbox: The harness' sandbox; every process in it is dead.
        backend: Makes the verifier's sandbox.
        sandbox_id: The new sandbox's id.
        root: Host directory of the manager's sandboxes.

    Raises:
        VerifierError: The verifier crashed, ran into its time limit or printed no score.
        SandboxError: The sandbox could not be made, or the workspace not be copied.
    """
    verifier = task.verifier
    sandbox = await backend.create(sandbox_id=sandbox_id, root=root)
    try:
        await sandbox.load(harness_sandbox.workspace)
        files = {f"{VERIFIER_FOLDER}/{path}": data for path, data in verifier.files.items()}
        await sandbox.put_files(files, area="home")
        folder = f"{sandbox.home_path}/{VERIFIER_FOLDER}"
        result = await sandbox.exec(
            expand_argv(verifier.argv, sandbox.python),
            env={"CLAWGYM_WORKSPACE": sandbox.workspace_path, "CLAWGYM_VERIFIER": folder},
            cwd=folder,
            limits=Limits(wall_s=verifier.timeout_s, output_kb=OUTPUT_KB),
        )
    finally:
        await sandbox.destroy()
    tail = result.stderr.decode("utf-8", "replace")[-2000:]
    if result.timed_out:
        raise VerifierError(
            f"task {task.task_id!r}: the verifier took longer than {verifier.timeout_s:g} s"
        )
    if result.flooded:
        raise VerifierError(
            f"task {task.task_id!r}: the verifier was ended after more than {OUTPUT_KB} KB of "
            "output"
        )
    if result.returncode != 0:
        said = f"its stderr ends with: {tail!r}" if tail else "its stderr is empty"
        raise VerifierError(
            f"task {task.task_id!r}: the verifier ended with status {result.returncode}; {said}"
        )
    try:
        return parse_score(result.stdout)
    except VerifierError as error:
        raise VerifierError(f"task {task.task_id!r}: {error}") from error


def expand_argv(argv: Sequence[str], python: str) -> tuple[str, ...]:
    """Replace a first word ``{python}`` by an isolated Python that knows the standard library."""
    if argv[0] == "{python}":
        return (python, "-I", "-S", *argv[1:])
    return tuple(argv)
