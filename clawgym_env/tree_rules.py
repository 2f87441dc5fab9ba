"""Which calls a tree holds, and why the others are left out: the call table of a PrefixTree.

Knows calls and how they continue one another, and nothing of the trie that holds their tokens.
Invariant: a call is either included, or carries exactly one reason. In the order in which they are
asked, the reasons are:

``no ids``       the prompt's or the reply's ids are unknown (no renderer was set)
``empty``        the prompt or the reply has no token
``unsampled``    the reply has no logprobs, so no policy sampled it (unless the rules admit it)
``auxiliary``    the call is not the agent's (unless the rules admit it)
``undelivered``  the reply never reached the harness, or nobody knows and no later call continues it
``superseded``   a dead leaf: the harness dropped this reply and what followed it for another one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from clawgym_env.calls import CallKind, CapturedCall, FinishReason, Rollout

DeadLeaves = Literal["superseded", "segment", "keep"]


@dataclass(frozen=True, slots=True)
class TreeRules:
    """What a tree takes in.

    Attributes:
        auxiliary: Include calls of kind ``auxiliary``.
        unsampled: Include replies without logprobs, such as scripted demonstrations.
        dead_leaves: Which regenerated replies to leave out. ``superseded``: of several replies of a
            rollout to one prompt, keep the one with the longest continuation and drop the others
            with all that follows them. ``segment``: of each segment (a root and what extends it)
            keep only the path to the leaf with the longest continuation, as ClawGym II publishes
            it (arXiv 2608.16798); a turn that the harness rewrote then costs the original branch.
            ``keep``: drop none. Continuations compare by calls, then tokens, then later arrival.
    """

    auxiliary: bool = False
    unsampled: bool = False
    dead_leaves: DeadLeaves = "superseded"


@dataclass(frozen=True, slots=True)
class TreeRollout:
    """What a tree keeps of a rollout; see ``calls.Rollout`` for the fields."""

    rollout_id: str
    task_id: str = ""
    harness: str = ""
    group_id: str | None = None
    outcome: str | None = None
    reward: float | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> TreeRollout:
        """The record of ``rollout``."""
        return cls(
            rollout_id=rollout.rollout_id,
            task_id=rollout.task_id,
            harness=rollout.harness,
            group_id=rollout.group_id,
            outcome=str(rollout.outcome),
            reward=rollout.reward,
        )


@dataclass(frozen=True, slots=True)
class TreeCall:
    """What a tree keeps of a call beside its tokens.

    Attributes:
        call_id: The call's id.
        rollouts: The rollouts that contain it, as indices into the tree's; several after a fork.
        index: Arrival index within its rollout.
        kind: ``main`` or ``auxiliary``.
        prompt_tokens: Tokens of the prompt, 0 where unknown.
        sampled_tokens: Tokens of the reply, 0 where unknown.
        parent: Index of the call whose prompt and reply are the longest prefix of the prompt.
        spawn_parent: For a root that is not its rollout's first call, the call delivered last
            before it: a sub-agent or a compaction. It carries credit, no tokens.
        delivered: As captured.
        drift: Why the call continues an earlier one without extending it, as captured.
        excluded: Why the tree does not hold the call, or None.
        finish_reason: As captured.
        tool_names: The tools that the reply calls.
        parse_error: Why the reply did not parse, as captured.
        policy_version: Version of the weights that produced the reply.
    """

    call_id: str
    rollouts: tuple[int, ...]
    index: int
    kind: CallKind
    prompt_tokens: int
    sampled_tokens: int
    parent: int | None
    spawn_parent: int | None
    delivered: bool | None
    drift: str | None
    excluded: str | None
    finish_reason: FinishReason
    tool_names: tuple[str, ...]
    parse_error: str | None
    policy_version: int

    @property
    def has_ids(self) -> bool:
        """Whether both prompt and reply have token ids."""
        return self.prompt_tokens > 0 and self.sampled_tokens > 0

    @property
    def tokens(self) -> int:
        """Tokens of prompt and reply together."""
        return self.prompt_tokens + self.sampled_tokens

    @property
    def extends(self) -> bool:
        """Whether the prompt extends an earlier call's prompt and reply token by token."""
        return self.parent is not None


def call_table(
    captured: Sequence[CapturedCall],
    owners: Sequence[tuple[int, ...]],
    parents: Sequence[int | None],
    rules: TreeRules,
) -> tuple[TreeCall, ...]:
    """The call table, with spawn parents and reasons for exclusion filled in.

    Args:
        captured: The calls, each once, in arrival order within each rollout.
        owners: The rollouts of each call.
        parents: The parent of each call by tokens.
        rules: What to include.
    """
    continued = {parent for parent in parents if parent is not None}
    table = [
        TreeCall(
            call_id=item.call.call_id,
            rollouts=owners[number],
            index=item.call.index,
            kind=item.call.kind,
            prompt_tokens=len(item.prompt_ids or ()),
            sampled_tokens=len(item.completion.token_ids or ()),
            parent=parents[number],
            spawn_parent=_spawn_parent(number, captured, owners, parents),
            delivered=item.delivered,
            drift=item.drift,
            excluded=_exclusion(item, number in continued, rules),
            finish_reason=item.completion.finish_reason,
            tool_names=tuple(call.name for call in item.completion.message.tool_calls),
            parse_error=item.completion.parse_error,
            policy_version=item.completion.policy_version,
        )
        for number, item in enumerate(captured)
    ]
    for number in _dead(table, captured, rules.dead_leaves):
        if not table[number].excluded:
            table[number] = replace(table[number], excluded="superseded")
    return tuple(table)


def _exclusion(item: CapturedCall, continued: bool, rules: TreeRules) -> str | None:
    if item.prompt_ids is None or item.completion.token_ids is None:
        return "no ids"
    if not item.prompt_ids or not item.completion.token_ids:
        return "empty"
    if item.completion.logprobs is None and not rules.unsampled:
        return "unsampled"
    if item.call.kind == "auxiliary" and not rules.auxiliary:
        return "auxiliary"
    if item.delivered is False or (item.delivered is None and not continued):
        return "undelivered"
    return None


def _spawn_parent(
    number: int,
    captured: Sequence[CapturedCall],
    owners: Sequence[tuple[int, ...]],
    parents: Sequence[int | None],
) -> int | None:
    root = captured[number]
    if parents[number] is not None or root.call.kind == "auxiliary":
        return None
    last: int | None = None
    last_time = 0.0
    for other in range(number):
        candidate = captured[other]
        time = candidate.completion.finished_at
        if (
            candidate.delivered is not False
            and candidate.call.kind == "main"
            and time <= root.call.arrived_at
            and (last is None or time >= last_time)
            and not set(owners[other]).isdisjoint(owners[number])
        ):
            last, last_time = other, time
    return last


def _dead(
    table: Sequence[TreeCall], captured: Sequence[CapturedCall], rule: DeadLeaves
) -> set[int]:
    """Calls that the rule calls dead, with everything that continues them."""
    if rule == "keep":
        return set()
    below: dict[int, list[int]] = {}
    for number, call in enumerate(table):
        if call.parent is not None:
            below.setdefault(call.parent, []).append(number)

    # (included calls, tokens, arrival) of the best path from each call downwards; parents come
    # first in the table, so going backwards has seen every child.
    best: dict[int, tuple[int, int, int]] = {}
    for number in reversed(range(len(table))):
        call = table[number]
        here = (0, call.tokens, number)
        calls, tokens, leaf = max((best[child] for child in below.get(number, ())), default=here)
        best[number] = (calls + (not call.excluded), tokens, leaf)

    dead: set[int] = set()
    contests = list(_same_prompt(table, captured))
    if rule == "segment":
        contests.extend(_same_parent(table))
    for rivals in contests:
        keep = max(rivals, key=lambda rival: best[rival])
        dead.update(_with_descendants((rival for rival in rivals if rival != keep), below))
    return dead


def _same_prompt(
    table: Sequence[TreeCall], captured: Sequence[CapturedCall]
) -> Iterator[list[int]]:
    """Included calls of one rollout that answer one prompt, where there are several."""
    buckets: dict[tuple[int, int | None, int], list[list[int]]] = {}
    for number, call in enumerate(table):
        if call.excluded:
            continue
        for rollout in call.rollouts:
            bucket = buckets.setdefault((rollout, call.parent, call.prompt_tokens), [])
            for rivals in bucket:
                if captured[rivals[0]].prompt_ids == captured[number].prompt_ids:
                    rivals.append(number)
                    break
            else:
                bucket.append([number])
    for bucket in buckets.values():
        yield from (rivals for rivals in bucket if len(rivals) > 1)


def _same_parent(table: Sequence[TreeCall]) -> Iterator[list[int]]:
    """Included calls of one rollout that continue one call, where there are several."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for number, call in enumerate(table):
        if call.excluded or call.parent is None:
            continue
        for rollout in call.rollouts:
            buckets.setdefault((rollout, call.parent), []).append(number)
    yield from (rivals for rivals in buckets.values() if len(rivals) > 1)


def _with_descendants(numbers: Iterable[int], below: Mapping[int, Sequence[int]]) -> set[int]:
    found: set[int] = set()
    pending = list(numbers)
    while pending:
        number = pending.pop()
        if number not in found:
            found.add(number)
            pending.extend(below.get(number, ()))
    return found
