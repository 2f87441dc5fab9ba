"""``clawgym doctor``: what works here, what is missing, and the command that fixes it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        what: The part that was looked at.
        state: ``ok``, ``missing`` (something is lost without it) or ``optional``.
        detail: Version or reason.
        remedy: The command that fixes it, if one is needed.
    """

    what: str
    state: str
    detail: str
    remedy: str = ""


def doctor(
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 if anything is missing.")
    ] = False,
) -> None:
    """Show what works on this machine, what is missing, and the command that fixes it."""
    table = Table("part", "state", "detail", "remedy")
    colours = {"ok": "green", "missing": "red", "optional": "yellow"}
    missing = False
    for finding in findings():
        missing |= finding.state == "missing"
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        table.add_row(finding.what, state, escape(finding.detail), escape(finding.remedy))
    Console().print(table)
    if strict and missing:
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """Look at every part, in the order in which a newcomer needs them."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("cores, memory", "ok", f"{os.cpu_count()} cores, {_memory_gib():.1f} GiB")
    for package in ("gymnasium", "starlette", "uvicorn", "tokenizers", "renderers"):
        yield _package(package, "missing", "pip install clawgym")
    yield from _sandboxes()
    yield from _harnesses()
    for package in ("torch", "transformers", "peft", "tensorboard", "matplotlib"):
        yield _package(package, "optional", "pip install 'clawgym[agents]'")
    yield _agents_import()
    yield _package("docker", "optional", "pip install 'clawgym[docker]'")
    yield _package("vllm", "optional", "pip install 'clawgym[vllm]'")
    node = shutil.which("node")
    yield Finding("node", "ok" if node else "optional", node or "not found", "")


def _sandboxes() -> Iterator[Finding]:
    from clawgym_env.sandboxes import BACKENDS, default_backend, get_backend

    for name in BACKENDS:
        reason = get_backend(name).check()
        if reason is None:
            yield Finding(f"sandbox {name}", "ok", "works")
        else:
            yield Finding(f"sandbox {name}", "missing", reason)
    yield Finding("default sandbox", "ok", default_backend().name)


def _harnesses() -> Iterator[Finding]:
    from clawgym_env.harnesses import HARNESSES, get_harness

    for name in HARNESSES:
        harness = get_harness(name)
        if harness.installed():
            yield Finding(f"harness {name}", "ok", harness.version() or "")
        else:
            remedy = f"clawgym harness install {name}"
            yield Finding(f"harness {name}", "optional", "not installed", remedy)


def _package(name: str, without: str, remedy: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, without, "not installed", remedy)


def _agents_import() -> Finding:
    """Whether ``import agents`` finds this project's package: the name is popular."""
    spec = importlib.util.find_spec("agents")
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    if origin is None:
        return Finding("agents", "optional", "not importable", "pip install 'clawgym[agents]'")
    if not (origin.parent / "grpo.py").is_file():
        other = _owner_of(origin)
        return Finding(
            "agents",
            "missing",
            f"another package shadows ours: {origin}{other}",
            "uninstall it, or use an environment of its own for it",
        )
    return Finding("agents", "ok", "importable")


def _owner_of(path: Path) -> str:
    try:
        files = distribution("openai-agents").files or []
    except PackageNotFoundError:
        return ""
    return " (openai-agents)" if any(str(f).startswith("agents/") for f in files) else ""


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
