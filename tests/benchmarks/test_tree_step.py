from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tree_cases import long_chain, rollout_of
from typer.testing import CliRunner

from benchmarks.capturing import capture_trees, captured_trees
from benchmarks.cli import app
from benchmarks.measuring import interleaved
from benchmarks.registry import BENCHMARKS, Benchmark, load
from benchmarks.synthetic import Shape, chain_of_ratio, synthetic_rollouts
from clawgym_env.errors import ClawgymError, ConfigError, UnknownNameError
from clawgym_env.store import CaptureStore
from clawgym_env.trees import PrefixTree

TINY = ["--tokens", "64", "--hidden", "64", "--layers", "1", "--repeats", "1", "--threads", "1"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "captures.sqlite"
    with CaptureStore(path) as opened:
        rollout = rollout_of(long_chain(3, 6, 4))
        opened.begin_rollout(rollout)
        for call in rollout.calls:
            opened.commit_call(call)
            opened.mark_delivered(call.call.call_id, True)
        opened.finish_rollout(rollout)
    return path


def test_list_names_every_benchmark() -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in BENCHMARKS)


def test_tree_step_on_made_up_and_captured_trees(tmp_path: Path, store: Path) -> None:
    threads = torch.get_num_threads()
    output = tmp_path / "new" / "results.jsonl"
    result = CliRunner().invoke(
        app,
        ["run", "tree_step", *TINY, "--ratios", "1,3", "--store", str(store)]
        + ["--output", str(output)],
    )
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    cases = [line["case"] for line in lines]
    assert cases == ["chain, ratio 1", "chain, ratio 3", "8 rollouts, 4 turns", "captured, react"]
    assert all(case in result.stdout for case in cases)
    chain, captured = lines[1], lines[3]
    assert chain["ideal_ratio"] == pytest.approx(3.0, rel=0.05)
    assert (captured["calls"], captured["tokens"], captured["call_tokens"]) == (3, 30, 60)
    for line in lines:
        assert line["loss_gap"] < 1e-4
        assert line["speedup"] > 0 and "commit" in line and line["device"] == "cpu"


def test_trees_are_captured_on_the_spot() -> None:
    (trees,) = capture_trees(2, 3).values()
    assert len(trees) == 2
    for tree in trees:
        assert len(tree.rollouts) == 3
        assert tree.included and all(call.drift is None for call in tree.calls)
        assert tree.stats().ideal_ratio > 2.0


def test_captured_trees_of_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "captures.sqlite"
    CaptureStore(path).close()
    with pytest.raises(ConfigError, match="no finished rollout with sampled calls"):
        captured_trees(path)


def test_bad_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="unknown benchmark 'tree_stp'; did you mean"):
        load("tree_stp")
    for options, field in ((["--ratios", "2,x"], "--ratios"), (["--hidden", "65"], "--hidden")):
        result = CliRunner().invoke(app, ["run", "tree_step", *TINY, *options])
        assert isinstance(result.exception, ConfigError) and field in str(result.exception)
    monkeypatch.setitem(BENCHMARKS, "odd", Benchmark("benchmarks.odd", ""))
    monkeypatch.setitem(sys.modules, "benchmarks.odd", None)
    with pytest.raises(ClawgymError, match="benchmark 'odd' needs the package"):
        load("odd")


@pytest.mark.parametrize("ratio", [1, 2, 4, 20])
def test_made_up_chains_have_the_ratio_asked_for(ratio: int) -> None:
    tree = PrefixTree.from_rollouts(synthetic_rollouts(chain_of_ratio(ratio, 2000), 100))
    stats = tree.stats()
    assert stats.ideal_ratio == pytest.approx(ratio, rel=0.01)
    assert stats.unique_tokens == pytest.approx(2000, rel=0.05)


def test_made_up_groups_share_their_prompt() -> None:
    shape = Shape("group", 2000, turns=2, rollouts=4, shared=0.5)
    stats = PrefixTree.from_rollouts(synthetic_rollouts(shape, 100_000)).stats()
    assert stats.unique_tokens == pytest.approx(2000, rel=0.05)
    assert (stats.rollouts, stats.branches, stats.leaves) == (4, 1, 4)


def test_variants_take_turns_after_a_first_run_of_each() -> None:
    order: list[str] = []
    medians = interleaved(
        {name: lambda name=name: order.append(name) for name in "ab"},  # type: ignore[misc]
        3,
    )
    assert order == ["a", "b"] * 4
    assert medians.keys() == {"a", "b"}
