"""mini-swe-agent, which nobody here wrote, solves a task under the scripted policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawgym_env import CaptureStore
from clawgym_env.calls import Outcome
from clawgym_env.cli import app
from clawgym_env.harnesses import get_harness
from clawgym_env.tasks import load_tasks
from clawgym_env.tree_rules import TreeRules
from clawgym_env.trees import PrefixTree


@pytest.mark.harness
def test_the_oracle_solves_a_task_call_by_call(tiny_directory: Path, tmp_path: Path) -> None:
    harness = get_harness("mini-swe-agent")
    harness.install(print)
    store = tmp_path / "captures.db"
    options = ["--harness", "mini-swe-agent", "--tasks", "key_lookup:level=2", "--tree"]
    options += ["--model", str(tiny_directory), "--store", str(store)]
    result = CliRunner().invoke(app, ["rollout", *options])
    assert result.exit_code == 0, result.output
    assert "mean reward 1.000 over 1 scored; completed 1" in result.output
    with CaptureStore(store, read_only=True) as captured:
        (rollout_id,) = captured.rollout_ids(finished=True)
        rollout = captured.rollout(rollout_id)
    assert (rollout.outcome, rollout.reward, rollout.drift_rate) == (Outcome.COMPLETED, 1.0, 0.0)
    # Replies as the oracle scripted them, each delivered, each call extending the one before.
    moves = harness.script(load_tasks("key_lookup:level=2")[0].solution)
    assert [call.completion.message.tool_calls[0].arguments for call in rollout.calls] == [
        move.tool_calls[0].arguments for move in moves
    ]
    assert all(call.delivered and call.drift is None and call.prompt_ids for call in rollout.calls)
    tree = PrefixTree.from_rollouts([rollout], TreeRules(unsampled=True))
    assert len(tree.included) == len(moves)
    assert (tree.stats().roots, tree.stats().leaves, tree.stats().drift) == (1, 1, 0)
    # The printed tree shows the same calls, one a line, each below the one that it extends.
    lines = re.findall(r"#(\d+) main · (\d+)", result.output)
    assert lines == [(str(n), str(len(c.prompt_ids or ()))) for n, c in enumerate(rollout.calls)]
