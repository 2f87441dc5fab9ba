"""Checkpoints: a trainer's whole state in a directory that is there whole or not at all.

    step-000012/
      policy/        the policy as CausalPolicy.save writes it
      optimizer.pt   the optimiser's state
      trainer.json   step, counts, settings, random state

It knows files and nothing of training. Invariant: a name of the form ``step-N`` is a complete
checkpoint; a kill at any moment leaves at most a directory under another name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agents.models.policy import CausalPolicy
from clawgym_env.errors import ConfigError

_STEP = re.compile(r"step-(\d{6,})")
VERSION = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds beside the policy.

    Attributes:
        state: Plain JSON values of the trainer's.
        optimizer: The optimiser's state dict.
    """

    state: dict[str, Any]
    optimizer: dict[str, Any]


def save(
    path: Path, policy: CausalPolicy, optimizer: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Write a checkpoint, replacing one of the same name.

    Raises:
        OSError: The disk is full or the path not writable; nothing is left under ``path``'s name
            that was not there before.
    """
    from agents.models.directories import written_at_once

    path.parent.mkdir(parents=True, exist_ok=True)
    with written_at_once(path) as draft:
        policy.save(draft / "policy")
        torch.save(dict(optimizer), draft / "optimizer.pt")
        record = {"version": VERSION, **state}
        (draft / "trainer.json").write_text(json.dumps(record, indent=2) + "\n")


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; the policy is loaded apart, by ``CausalPolicy.load(path / "policy")``.

    Raises:
        ConfigError: There is no checkpoint there, or it is of a newer version.
    """
    record = path / "trainer.json"
    if not record.is_file():
        raise ConfigError(f"{path} holds no checkpoint (trainer.json is missing)")
    state = json.loads(record.read_text())
    if state.pop("version") > VERSION:
        raise ConfigError(f"{path} was written by a newer clawgym; upgrade to load it")
    optimizer = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    return Checkpoint(state, optimizer)


def steps(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(m[1]), p) for p in directory.iterdir() if (m := _STEP.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def latest(directory: Path) -> Path | None:
    """The newest checkpoint in a directory, or None."""
    found = steps(directory)
    return found[-1] if found else None


def remove(path: Path) -> None:
    """Delete a checkpoint; it has no complete-looking name from the first moment on."""
    doomed = path.with_name(f".removed-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)
