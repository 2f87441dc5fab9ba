"""Captured trees for benchmarks: from a capture store, or captured on the spot.

What is captured on the spot is real but for the model: the family's fallible demonstrator answers
ReAct, in a sandbox and through the proxy, and a tokenizer trained on those calls gives the ids.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agents.models.policy import CausalPolicy
from agents.models.tiny import make_tiny
from agents.rollouts import Collector, EnvParts, Job
from agents.warmstart import conversation_text, with_token_ids
from clawgym_env.calls import Rollout
from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import get_harness
from clawgym_env.policies import ScriptedPolicy
from clawgym_env.runtime import RuntimeSettings
from clawgym_env.store import CaptureStore
from clawgym_env.tasks import get_family, load_tasks
from clawgym_env.tree_rules import TreeRules
from clawgym_env.trees import PrefixTree

FAMILY = "key_lookup"
LEVEL = 3


def captured_trees(store: Path, most: int | None = None) -> dict[str, list[PrefixTree]]:
    """Trees of the finished rollouts in a capture store, one a group, by harness.

    Args:
        store: The store's file; it is only read.
        most: The latest so many groups of each harness, all by default.

    Raises:
        CaptureError: The store cannot be read.
        ConfigError: It holds no rollout with a call that can be trained on.
    """
    groups: dict[tuple[str, str | None, str], list[Rollout]] = {}
    with CaptureStore(store, read_only=True) as opened:
        for rollout_id in opened.rollout_ids(finished=True):
            rollout = opened.rollout(rollout_id)
            key = (rollout.harness, rollout.group_id, rollout.task_id)
            groups.setdefault(key, []).append(rollout)
    trees = _trees(groups, TreeRules(), most)
    if not trees:
        raise ConfigError(
            f"{store} holds no finished rollout with sampled calls; capture some with a policy "
            "that returns token ids and logprobs"
        )
    return trees


def capture_trees(
    groups: int, group_size: int = 8, *, harness: str = "react", sandbox: str | None = None
) -> dict[str, list[PrefixTree]]:
    """Run groups of demonstrations through a harness, and give their trees, one a group.

    Args:
        groups: How many tasks.
        group_size: Rollouts a task; each is another sequence of moves.
        harness: Name of the harness.
        sandbox: Backend's name, or None for the best that works.

    Returns:
        The trees, under the harness' name; their replies have no logprobs.
    """
    tasks = load_tasks(f"{FAMILY}:level={LEVEL}")
    family = get_family(FAMILY)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "captures.db"
        parts = EnvParts(get_harness(harness), tasks, RuntimeSettings(sandbox=sandbox, store=store))
        jobs = [
            Job(
                task,
                ScriptedPolicy(parts.harness.script(family.novice(task, rng))),
                group_id=task.task_id,
            )
            for task in (tasks[index] for index in range(groups))
            for _ in range(group_size)
        ]
        with Collector(parts) as collector:
            rollouts = collector.collect(jobs)
        failed = [rollout for rollout in rollouts if rollout.outcome.is_infrastructure]
        if failed:
            raise ConfigError(f"rollouts could not be captured: {failed[0].detail}")
        texts = [conversation_text(rollout.calls[-1]) for rollout in rollouts]
        make_tiny(texts, Path(directory) / "model", size="200k")
        renderer = CausalPolicy.from_pretrained(Path(directory) / "model").renderer
        grouped: dict[tuple[str, str | None, str], list[Rollout]] = {}
        for rollout in rollouts:
            key = (rollout.harness, rollout.group_id, rollout.task_id)
            grouped.setdefault(key, []).append(with_token_ids(rollout, renderer))
    return _trees(grouped, TreeRules(unsampled=True), None)


def _trees(
    groups: Mapping[tuple[str, str | None, str], Sequence[Rollout]],
    rules: TreeRules,
    most: int | None,
) -> dict[str, list[PrefixTree]]:
    trees: dict[str, list[PrefixTree]] = {}
    for (harness, *_), members in reversed(list(groups.items())):
        of_harness = trees.setdefault(harness, [])
        if most is None or len(of_harness) < most:
            tree = PrefixTree.from_rollouts(members, rules=rules)
            of_harness += [tree] if tree.included else []
    return {harness: found for harness, found in trees.items() if found}
