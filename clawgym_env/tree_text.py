"""A tree of calls as plain text, one line a call, for terminals and logs.

Knows the call table and, given a decoder, the sampled text. Knows no colours and no terminal width.
Invariant: every captured call is shown once, excluded ones with the reason.

A call that alone continues the one above stays at its indentation; indentation grows only where the
conversation forks, so a long rollout reads straight down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clawgym_env.tree_rules import TreeCall, TreeRollout
from clawgym_env.trees import PrefixTree

SNIPPET = 72
"""Characters of a reply that are shown."""


def tree_text(tree: PrefixTree, decode: Callable[[Sequence[int]], str] | None = None) -> str:
    """The tree as lines of text.

    Args:
        tree: The tree.
        decode: Turns token ids into text; given, each call's line is followed by its reply's start.

    Returns:
        Lines joined by newlines, without one at the end.
    """
    lines: list[str] = []
    firsts = _firsts(tree)
    for number, rollout in enumerate(tree.rollouts):
        lines.append(_rollout_line(rollout))
        below: dict[int | None, list[int]] = {}
        for index, call in enumerate(tree.calls):
            if number in call.rollouts:
                below.setdefault(call.parent, []).append(index)
        # (call, indentation of its line, indentation of what follows it)
        pending = [(root, "├─ ", "│  ") for root in reversed(below.get(None, []))]
        if pending:
            root, _, _ = pending[0]
            pending[0] = (root, "└─ ", "   ")
        while pending:
            index, head, rest = pending.pop()
            lines.append(head + _call_line(tree, index, index in firsts))
            if decode is not None and tree.calls[index].sampled_tokens:
                ids = tree.reply_tokens[tree.reply(index)].tolist()
                lines.append(f"{rest}     {_snippet(decode(ids))}")
            children = below.get(index, [])
            if len(children) == 1:
                pending.append((children[0], rest, rest))
            else:
                for child in reversed(children):
                    last = child == children[-1]
                    pending.append(
                        (
                            child,
                            rest + ("└─ " if last else "├─ "),
                            rest + ("   " if last else "│  "),
                        )
                    )
    lines.append(_summary(tree))
    return "\n".join(lines)


def _rollout_line(rollout: TreeRollout) -> str:
    parts = [f"rollout {rollout.rollout_id}", rollout.task_id, rollout.harness]
    parts.append(rollout.outcome or "")
    if rollout.outcome is not None:
        parts.append("no reward" if rollout.reward is None else f"reward {rollout.reward:g}")
    return " · ".join(part for part in parts if part)


def _call_line(tree: PrefixTree, index: int, first: bool) -> str:
    call = tree.calls[index]
    parts = [f"#{call.index} {call.kind}", _tokens(tree, call)]
    if call.has_ids and not first:
        parts.append("extends" if call.extends else "new root")
    parts.append(call.finish_reason)
    if call.tool_names:
        parts.append("calls " + ", ".join(call.tool_names))
    if call.spawn_parent is not None:
        parts.append(f"spawned after #{tree.calls[call.spawn_parent].index}")
    if call.drift is not None:
        parts.append(f"drift: {call.drift}")
    if call.parse_error is not None:
        parts.append(f"unparsed: {call.parse_error}")
    if call.delivered is not True and call.excluded != "undelivered":
        parts.append("undelivered" if call.delivered is False else "delivery unknown")
    if call.excluded:
        parts.append(f"✗ {call.excluded}")
    return " · ".join(parts)


def _firsts(tree: PrefixTree) -> set[int]:
    """The first call of each rollout, which has nothing to extend."""
    firsts: dict[int, int] = {}
    for index, call in enumerate(tree.calls):
        for rollout in call.rollouts:
            firsts.setdefault(rollout, index)
    return set(firsts.values())


def _tokens(tree: PrefixTree, call: TreeCall) -> str:
    if not call.has_ids:
        return "no ids"
    known = tree.calls[call.parent].tokens if call.parent is not None else 0
    return f"{call.prompt_tokens} (+{call.prompt_tokens - known}) → {call.sampled_tokens}"


def _snippet(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SNIPPET else flat[: SNIPPET - 1] + "…"


def _summary(tree: PrefixTree) -> str:
    stats = tree.stats()
    excluded = ", ".join(f"{count} {reason}" for reason, count in sorted(stats.excluded.items()))
    left_out = f" ({excluded} left out)" if excluded else ""
    return (
        f"{stats.included} of {stats.calls} calls{left_out} · {stats.unique_tokens} tokens, "
        f"{stats.call_tokens} call by call (ratio {stats.ideal_ratio:.2f}) · "
        f"{stats.action_tokens} sampled · {stats.leaves} leaves, depth {stats.depth} · "
        f"extends {stats.extension_rate:.0%}, drift {stats.drift}"
    )
