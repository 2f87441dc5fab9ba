"""Rollouts and calls as the columns of their tables, and back.

This module knows the columns and nothing of connections or transactions. Invariant: the calls that
``captured_calls`` reads from a rollout's rows equal those whose columns were written, in whatever
way each was kept relative to an earlier one.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clawgym_env.calls import CapturedCall, Completion, Message, ModelCall, Outcome, Rollout, Tool
from clawgym_env.errors import CaptureError
from clawgym_env.store import records
from clawgym_env.store.lineage import Earlier, Lineage, shared_prefix, shared_suffix

UNFINISHED = "unfinished"
"""``Rollout.detail`` of a rollout that was begun and not finished (its manager runs, or died)."""


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """What lists show of a rollout.

    Attributes:
        rollout_id: The rollout.
        task_id: Its task.
        harness: Its harness.
        outcome: How it ended; None where it was begun and not finished.
        reward: The verifier's score, if any.
        calls: How many calls are committed.
        tokens: How many tokens were sampled in them; 0 where no renderer is set.
        started_at: Unix time in seconds.
    """

    rollout_id: str
    task_id: str
    harness: str
    outcome: Outcome | None
    reward: float | None
    calls: int
    tokens: int
    started_at: float


def rollout_columns(rollout: Rollout) -> dict[str, Any]:
    """All columns of a rollout but the counters; raises CaptureError for what cannot be kept."""
    if rollout.reward is not None and math.isnan(rollout.reward):
        raise CaptureError(
            f"rollout {rollout.rollout_id!r} has the reward NaN; give a number, or None where "
            "there is no score"
        )
    return {
        "rollout_id": rollout.rollout_id,
        "task_id": rollout.task_id,
        "harness": rollout.harness,
        "outcome": rollout.outcome.value,
        "reward": None if rollout.reward is None else float(rollout.reward),
        "rewards": records.encode_plain(rollout.rewards, "Rollout.rewards"),
        "group_id": rollout.group_id,
        "seed": None if rollout.seed is None else str(rollout.seed),  # may exceed 64 bits
        "policy_version": rollout.policy_version,
        "started_at": rollout.started_at,
        "finished_at": rollout.finished_at,
        "detail": rollout.detail,
        "metadata": records.encode_plain(rollout.metadata, "Rollout.metadata"),
    }


def rollout_of(row: sqlite3.Row, calls: tuple[CapturedCall, ...]) -> Rollout:
    """The rollout of a row; an unfinished one is ``CANCELLED`` with the detail ``UNFINISHED``."""
    finished = row["outcome"] is not None
    return Rollout(
        rollout_id=row["rollout_id"],
        task_id=row["task_id"],
        harness=row["harness"],
        outcome=Outcome(row["outcome"]) if finished else Outcome.CANCELLED,
        reward=row["reward"],
        rewards=records.decode_plain(row["rewards"]),
        calls=calls,
        group_id=row["group_id"],
        seed=None if row["seed"] is None else int(row["seed"]),
        policy_version=row["policy_version"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        detail=row["detail"] if finished else UNFINISHED,
        metadata=records.decode_plain(row["metadata"]),
    )


def summary_of(row: sqlite3.Row) -> RolloutSummary:
    """The summary of a row that has its columns and no others."""
    fields = dict(row)
    if fields["outcome"] is not None:
        fields["outcome"] = Outcome(fields["outcome"])
    return RolloutSummary(**fields)


def call_columns(
    captured: CapturedCall, lineage: Lineage
) -> tuple[dict[str, Any], tuple[bytes, bytes]]:
    """All columns of a call but ``seq``, kept relative to what ``lineage`` finds.

    Returns:
        The columns, and what ``Lineage.add`` needs of the call besides its row and request: the
        tools and the sequence as encoded.

    Raises:
        CaptureError: Something of the call cannot be kept without loss.
    """
    call, completion = captured.call, captured.completion
    tools = records.encode_tools(call.tools)
    prompt = None if captured.prompt_ids is None else records.encode_ids(captured.prompt_ids)
    reply = None if completion.token_ids is None else records.encode_ids(completion.token_ids)
    columns = {
        "call_id": call.call_id,
        "rollout_id": call.rollout_id,
        "call_index": call.index,
        "protocol": call.protocol,
        "model": call.model,
        "kind": call.kind,
        "stream": call.stream,
        "include_usage": call.include_usage,
        "tool_choice": records.encode_plain(call.tool_choice, "tool_choice"),
        "sampling": records.encode_sampling(call.sampling),
        "arrived_at": call.arrived_at,
        **_body_columns(call, tools, *lineage.body_base(call)),
        **_prompt_columns(prompt, lineage),
        "parent_id": captured.parent_id,
        "extends": captured.extends,
        "drift": captured.drift,
        "reply": records.encode_messages([completion.message]).decode(),
        "finish_reason": completion.finish_reason,
        "token_ids": reply,
        "logprobs": None
        if completion.logprobs is None
        else records.encode_logprobs(completion.logprobs),
        "policy_version": completion.policy_version,
        "parse_error": completion.parse_error,
        "started_at": completion.started_at,
        "finished_at": completion.finished_at,
        "delivered": captured.delivered,
    }
    # What later prompts may share: nothing where there is no prompt.
    return columns, (tools, b"" if prompt is None else prompt + (reply or b""))


def _body_columns(
    call: ModelCall, tools: bytes, base: Earlier | None, shared: int
) -> dict[str, Any]:
    same_tools = base is not None and base.tools == tools
    if not same_tools:
        records.check_tools(call.tools, tools)
    earlier = base.call.raw if base is not None else b""
    prefix = shared_prefix(earlier, call.raw)
    suffix = shared_suffix(earlier, call.raw, min(len(earlier), len(call.raw)) - prefix)
    messages = records.encode_messages(call.messages[shared:])
    return {
        "body_base": base and base.seq,
        "messages_shared": shared,
        "messages": records.pack(messages),
        "tools": None if same_tools else records.pack(tools),
        "raw_prefix": prefix,
        "raw_suffix": suffix,
        "raw": records.pack(call.raw[prefix : len(call.raw) - suffix], messages),
    }


def _prompt_columns(prompt: bytes | None, lineage: Lineage) -> dict[str, Any]:
    if prompt is None:
        return {"prompt_parent": None, "prompt_shared": 0, "prompt": None}
    base, shared = lineage.prompt_base(prompt)
    return {
        "prompt_parent": base and base.seq,
        "prompt_shared": shared // records.ID_BYTES,
        "prompt": prompt[shared:],
    }


class _Read(NamedTuple):
    """A call's fields that later calls may be kept relative to."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    raw: bytes
    sequence: tuple[int, ...]


_NOTHING = _Read((), (), b"", ())


def captured_calls(rows: Sequence[sqlite3.Row]) -> tuple[CapturedCall, ...]:
    """The calls of one rollout, all its rows given in the order of ``seq``, in arrival order.

    A base's row always comes before the rows kept relative to it, so one pass reads chains of any
    length.

    Raises:
        KeyError, TypeError, ValueError, zlib.error: The rows are damaged.
    """
    read: dict[int, _Read] = {}
    calls: list[CapturedCall] = []
    for row in rows:
        captured, read[row["seq"]] = _captured(row, read)
        calls.append(captured)
    return tuple(sorted(calls, key=lambda captured: captured.call.index))


def _captured(row: sqlite3.Row, read: Mapping[int, _Read]) -> tuple[CapturedCall, _Read]:
    base = _NOTHING if row["body_base"] is None else read[row["body_base"]]
    parent = _NOTHING if row["prompt_parent"] is None else read[row["prompt_parent"]]
    messages = records.unpack(row["messages"])
    prompt: tuple[int, ...] | None = None
    if row["prompt"] is not None:
        # Prompts share the ids' objects, which saves more memory than the tuples take.
        prompt = parent.sequence[: row["prompt_shared"]] + records.decode_ids(row["prompt"])
    reply = None if row["token_ids"] is None else records.decode_ids(row["token_ids"])
    kept = _Read(
        messages=base.messages[: row["messages_shared"]] + records.decode_messages(messages),
        tools=base.tools
        if row["tools"] is None
        else records.decode_tools(records.unpack(row["tools"])),
        raw=base.raw[: row["raw_prefix"]]
        + records.unpack(row["raw"], messages)
        + base.raw[len(base.raw) - row["raw_suffix"] :],
        sequence=() if prompt is None else prompt + (reply or ()),
    )
    call = ModelCall(
        call_id=row["call_id"],
        rollout_id=row["rollout_id"],
        index=row["call_index"],
        protocol=row["protocol"],
        model=row["model"],
        messages=kept.messages,
        tools=kept.tools,
        tool_choice=records.decode_plain(row["tool_choice"]),
        sampling=records.decode_sampling(row["sampling"]),
        stream=bool(row["stream"]),
        include_usage=bool(row["include_usage"]),
        kind=row["kind"],
        raw=kept.raw,
        arrived_at=row["arrived_at"],
    )
    logprobs, delivered = row["logprobs"], row["delivered"]
    completion = Completion(
        message=records.decode_messages(row["reply"])[0],
        finish_reason=row["finish_reason"],
        token_ids=reply,
        logprobs=None if logprobs is None else records.decode_logprobs(logprobs),
        policy_version=row["policy_version"],
        parse_error=row["parse_error"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
    )
    captured = CapturedCall(
        call=call,
        completion=completion,
        prompt_ids=prompt,
        delivered=None if delivered is None else bool(delivered),
        parent_id=row["parent_id"],
        extends=bool(row["extends"]),
        drift=row["drift"],
    )
    return captured, kept
