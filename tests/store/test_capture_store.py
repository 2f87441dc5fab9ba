from __future__ import annotations

import random
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawgym_env.calls import (
    CapturedCall,
    Completion,
    ImagePart,
    Message,
    ModelCall,
    Outcome,
    Rollout,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
)
from clawgym_env.errors import CaptureError, UnknownNameError
from clawgym_env.store import UNFINISHED, CaptureStore, RolloutSummary

SHORT = st.text(max_size=12)
FLOATS = st.floats(allow_nan=False)
TIMES = FLOATS.map(lambda value: value + 0.0)  # SQLite keeps -0.0 as 0.0
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | SHORT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(SHORT, JSON, max_size=3)
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12).map(tuple)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]) | SHORT,
    content=st.none()
    | SHORT
    | st.lists(st.builds(TextPart, SHORT) | st.builds(ImagePart, SHORT), max_size=3).map(tuple),
    reasoning=st.none() | SHORT,
    tool_calls=st.lists(st.builds(ToolCall, SHORT, SHORT, SHORT), max_size=2).map(tuple),
    tool_call_id=st.none() | SHORT,
    name=st.none() | SHORT,
)
SAMPLING = st.builds(
    Sampling,
    temperature=st.none() | FLOATS,
    top_p=st.none() | FLOATS,
    top_k=st.none() | st.integers(),
    max_tokens=st.none() | st.integers(),
    stop=st.lists(SHORT, max_size=2).map(tuple),
    seed=st.none() | st.integers(),
    presence_penalty=st.none() | FLOATS,
    frequency_penalty=st.none() | FLOATS,
    logprobs=st.booleans(),
    top_logprobs=st.none() | st.integers(),
)
TOOLS = st.lists(st.builds(Tool, SHORT, SHORT, OBJECTS), max_size=2).map(tuple)
SMALL_INTS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Rollouts whose calls continue, cut, alter or ignore what earlier calls sent."""
    rollout_id = draw(st.text(min_size=1, max_size=8))
    calls: list[CapturedCall] = []
    for index in range(draw(st.integers(0, 6))):
        call = draw(
            st.builds(
                ModelCall,
                call_id=st.just(f"{rollout_id}/{index}"),
                rollout_id=st.just(rollout_id),
                index=st.just(index),
                protocol=SHORT,
                model=SHORT,
                messages=st.lists(MESSAGES, max_size=3).map(tuple),
                tools=TOOLS,
                tool_choice=JSON,
                sampling=SAMPLING,
                stream=st.booleans(),
                include_usage=st.booleans(),
                kind=st.sampled_from(["main", "auxiliary"]),
                raw=st.binary(max_size=40),
                arrived_at=TIMES,
            )
        )
        completion = draw(
            st.builds(
                Completion,
                message=MESSAGES,
                finish_reason=st.sampled_from(["stop", "length", "tool_calls", "content_filter"]),
                token_ids=st.none() | IDS,
                logprobs=st.none() | st.lists(FLOATS, max_size=12).map(tuple),
                policy_version=SMALL_INTS,
                parse_error=st.none() | SHORT,
                started_at=TIMES,
                finished_at=TIMES,
            )
        )
        prompt = draw(st.none() | IDS)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            cut = draw(st.integers(0, 8))
            call = replace(
                call,
                messages=earlier.call.messages[: cut or None] + call.messages,
                raw=earlier.call.raw[:cut] + call.raw + earlier.call.raw[cut:],
                tools=draw(st.sampled_from([call.tools, earlier.call.tools])),
            )
            prompt = earlier.sequence[: cut or None] + (prompt or ())
        calls.append(
            CapturedCall(
                call,
                completion,
                prompt_ids=prompt,
                delivered=draw(st.sampled_from([None, True, False])),
                parent_id=draw(st.none() | SHORT),
                extends=draw(st.booleans()),
                drift=draw(st.none() | SHORT),
            )
        )
    return draw(
        st.builds(
            Rollout,
            rollout_id=st.just(rollout_id),
            task_id=SHORT,
            harness=SHORT,
            outcome=st.sampled_from(Outcome),
            reward=st.none() | FLOATS,
            rewards=st.dictionaries(SHORT, FLOATS, max_size=2),
            calls=st.just(tuple(calls)),
            group_id=st.none() | SHORT,
            seed=st.none() | st.integers(-(2**140), 2**140),
            policy_version=SMALL_INTS,
            started_at=TIMES,
            finished_at=TIMES,
            detail=SHORT,
            metadata=OBJECTS,
        )
    )


def capture(
    call_id: str = "c0", rollout_id: str = "r", index: int = 0, **fields: Any
) -> CapturedCall:
    request = {
        name: fields.pop(name)
        for name in ("messages", "tools", "raw", "sampling", "tool_choice")
        if name in fields
    }
    request.setdefault("messages", (Message("user", "hi"),))
    call = ModelCall(call_id, rollout_id, index, "openai_chat", "m", **request)
    completion = Completion(
        Message("assistant", "yes"), "stop", fields.pop("token_ids", None), policy_version=2
    )
    return CapturedCall(call, completion, **fields)


def begun(rollout_id: str = "r", **fields: Any) -> Rollout:
    defaults = {"task_id": "t", "harness": "react", "outcome": Outcome.COMPLETED}
    return Rollout(rollout_id, **{**defaults, **fields})


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with CaptureStore(tmp_path / "s.sqlite") as opened:
        yield opened


def count(store: CaptureStore, table: str = "calls") -> int:
    with sqlite3.connect(store.path) as connection:
        (found,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    connection.close()
    return int(found)


# --- what is written reads back -------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rollouts(), st.booleans(), st.booleans())
def test_a_rollout_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, rollout: Rollout, one_by_one: bool, reopen: bool
) -> None:
    path = tmp_path_factory.mktemp("store") / "s.sqlite"
    store = CaptureStore(path)
    if one_by_one:
        store.begin_rollout(rollout)
        for captured in rollout.calls:
            store.commit_call(replace(captured, delivered=None))
            if captured.delivered is not None:
                store.mark_delivered(captured.call.call_id, captured.delivered)
            if reopen:
                store.close()
                store = CaptureStore(path)
    store.finish_rollout(rollout)
    back = store.rollout(rollout.rollout_id)
    assert back == rollout
    assert repr(back.calls) == repr(rollout.calls)  # equality takes 1, 1.0 and True for the same
    (summary,) = store.summaries()
    assert (summary.calls, summary.outcome) == (len(rollout.calls), rollout.outcome)
    store.close()
    with CaptureStore(path, read_only=True) as reader:
        assert reader.rollout(rollout.rollout_id) == rollout


def test_prompts_are_kept_once_along_a_long_chain(store: CaptureStore) -> None:
    rng = random.Random(0)
    store.begin_rollout(begun())
    prompt: tuple[int, ...] = tuple(rng.randrange(50_000) for _ in range(100))
    messages = (Message("system", "rules"),)
    calls = []
    for index in range(1500):  # deeper than Python recurses
        reply = (rng.randrange(50_000), 2)
        calls.append(
            capture(f"c{index}", index=index, prompt_ids=prompt, token_ids=reply, messages=messages)
        )
        store.commit_call(calls[-1])
        prompt = (*prompt, *reply, index)
        messages = (*messages, Message("user", str(index)))
    assert store.rollout("r").calls == tuple(calls)
    with sqlite3.connect(store.path) as connection:
        kept, shared = connection.execute(
            "SELECT sum(length(prompt)), sum(prompt_shared) FROM calls"
        ).fetchone()
    connection.close()
    assert kept == 4 * (100 + 1499)
    assert shared == sum(100 + 3 * i - 1 for i in range(1, 1500))


def test_branches_share_the_longest_earlier_sequence(store: CaptureStore) -> None:
    store.begin_rollout(begun())
    trunk = capture("a", prompt_ids=(1, 2, 3), token_ids=(4,))
    left = capture("b", index=1, prompt_ids=(1, 2, 3, 4, 5), token_ids=(6,))
    right = capture("c", index=2, prompt_ids=(1, 2, 3, 4, 7), token_ids=(8,))
    deeper = capture("d", index=3, prompt_ids=(1, 2, 3, 4, 5, 6, 9), token_ids=(0,))
    root = capture("e", index=4, prompt_ids=(11, 12), token_ids=(13,))
    calls = (trunk, left, right, deeper, root)
    for captured in calls:
        store.commit_call(captured)
    with sqlite3.connect(store.path) as connection:
        query = "SELECT prompt_parent, prompt_shared, length(prompt) / 4 FROM calls ORDER BY seq"
        kept = connection.execute(query).fetchall()
    connection.close()
    assert kept == [(None, 0, 3), (1, 4, 1), (2, 4, 1), (2, 6, 1), (None, 0, 2)]
    assert store.rollout("r").calls == calls


def test_raw_bodies_and_messages_do_not_grow_with_the_square(store: CaptureStore) -> None:
    rng = random.Random(0)
    store.begin_rollout(begun())
    tools = (Tool("bash", "Run it.", {"type": "object"}),)
    turns: list[str] = []
    calls, sent = [], 0
    for index in range(80):
        turns.append(f"{rng.getrandbits(4096):x}")  # incompressible but for being hexadecimal
        quoted = ",".join(f'{{"role":"user","content":"{turn}"}}' for turn in turns)
        raw = f'{{"messages":[{quoted}],"tools":[{{"name":"bash"}}]}}'.encode()
        messages = tuple(Message("user", turn) for turn in turns)
        calls.append(capture(f"c{index}", index=index, messages=messages, raw=raw, tools=tools))
        store.commit_call(calls[-1])
        sent += len(raw)
    assert store.rollout("r").calls == tuple(calls)
    with sqlite3.connect(store.path) as connection:
        query = "SELECT sum(length(messages)), sum(length(raw)), sum(length(tools)) FROM calls"
        messages_kept, raw_kept, tools_kept = connection.execute(query).fetchone()
    connection.close()
    text = sum(map(len, turns))
    assert sent > 20 * text
    assert messages_kept < text
    assert raw_kept < text / 4  # what the messages hold already is not held again
    assert tools_kept < 100


def test_arrival_order_is_by_index(store: CaptureStore) -> None:
    store.begin_rollout(begun())
    for index in (2, 0, 1):
        store.commit_call(capture(f"c{index}", index=index))
    assert [c.call.call_id for c in store.rollout("r").calls] == ["c0", "c1", "c2"]


# --- exactly once, and whole ----------------------------------------------------------------


def test_a_call_is_committed_once(store: CaptureStore) -> None:
    store.begin_rollout(begun())
    store.begin_rollout(begun("other"))
    store.commit_call(capture("c0"))
    with pytest.raises(CaptureError, match="'c0' is in .* already"):
        store.commit_call(capture("c0"))
    with pytest.raises(CaptureError, match="already"):
        store.commit_call(capture("c0", rollout_id="other"))
    assert count(store) == 1
    assert [s.calls for s in store.summaries()] == [1, 0]
    store.commit_call(capture("c1", index=1))  # goes on after a refusal
    assert len(store.rollout("r").calls) == 2


def test_a_call_needs_a_rollout_that_is_open(store: CaptureStore) -> None:
    with pytest.raises(CaptureError, match="was not begun"):
        store.commit_call(capture())
    store.finish_rollout(begun())
    with pytest.raises(CaptureError, match="finished"):
        store.commit_call(capture())
    assert count(store) == 0


def test_a_rollout_begins_and_finishes_once(store: CaptureStore) -> None:
    store.begin_rollout(begun())
    with pytest.raises(CaptureError, match="'r' is in .* already"):
        store.begin_rollout(begun())
    store.finish_rollout(begun(reward=1.0))
    with pytest.raises(CaptureError, match=r"finished already \(completed\)"):
        store.finish_rollout(begun(reward=0.0))
    assert store.rollout("r").reward == 1.0


def test_finishing_is_all_or_nothing(store: CaptureStore) -> None:
    store.begin_rollout(begun())
    store.commit_call(capture("c0"))
    calls = (capture("c0"), capture("c1", index=1), capture("x", rollout_id="other"))
    with pytest.raises(CaptureError, match="a call of rollout 'other'"):
        store.finish_rollout(begun(calls=calls))
    assert store.rollout("r") == begun(
        outcome=Outcome.CANCELLED, detail=UNFINISHED, calls=(capture("c0"),)
    )
    store.finish_rollout(begun(calls=calls[:2]))
    assert store.rollout("r").calls == calls[:2]


def test_committed_calls_stay_though_the_record_lacks_them(store: CaptureStore) -> None:
    store.begin_rollout(begun())
    store.commit_call(capture("c0"))
    store.finish_rollout(begun(outcome=Outcome.CAPTURE_ERROR))
    assert store.rollout("r") == begun(outcome=Outcome.CAPTURE_ERROR, calls=(capture("c0"),))


def test_an_unfinished_rollout_is_listed_and_read_as_cancelled(store: CaptureStore) -> None:
    store.begin_rollout(begun(reward=1.0, rewards={"a": 1.0}, detail="x", started_at=3.0))
    store.commit_call(capture(token_ids=(1, 2), prompt_ids=(5,)))
    assert store.summaries() == (RolloutSummary("r", "t", "react", None, None, 1, 2, 3.0),)
    back = store.rollout("r")
    assert (back.outcome, back.detail, back.reward) == (Outcome.CANCELLED, UNFINISHED, None)
    assert back.outcome.is_infrastructure
    assert (back.rewards, len(back.calls)) == ({}, 1)


def test_delivery_marks(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with CaptureStore(path) as store:
        store.begin_rollout(begun())
        for index in range(4):
            store.commit_call(capture(f"c{index}", index=index))
            store.mark_delivered(f"c{index}", index % 2 == 0)
        store.mark_delivered("c3", True)  # the last word counts
        with pytest.raises(CaptureError, match="no call 'nope'"):
            store.mark_delivered("nope", True)
        told = [c.delivered for c in store.rollout("r").calls]
        assert told == [True, False, True, True]
        store.mark_delivered("c0", False)
    with CaptureStore(path) as store:
        stale = tuple(replace(c, delivered=None) for c in store.rollout("r").calls)
        store.finish_rollout(begun(calls=stale))
        assert [c.delivered for c in store.rollout("r").calls] == [False, False, True, True]


def test_many_threads(store: CaptureStore) -> None:
    def work(name: str) -> None:
        store.begin_rollout(begun(name))
        for index in range(20):
            call = capture(f"{name}-{index}", name, index, prompt_ids=tuple(range(index)))
            store.commit_call(call)
            store.mark_delivered(f"{name}-{index}", True)
        store.finish_rollout(begun(name))

    threads = [threading.Thread(target=work, args=(f"r{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(store) == 120
    assert all(s.calls == 20 and s.outcome for s in store.summaries())
    assert store.rollout("r3").calls[19].prompt_ids == tuple(range(19))


def test_another_process_reads_while_one_writes(store: CaptureStore) -> None:
    store.begin_rollout(begun())
    with CaptureStore(store.path, read_only=True) as reader:
        assert reader.rollout("r").calls == ()
        store.commit_call(capture())
        assert len(reader.rollout("r").calls) == 1
        with pytest.raises(CaptureError, match="readonly database; make the file"):
            reader.begin_rollout(begun("x"))


# --- what cannot be kept --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captured", "told"),
    [
        (capture(prompt_ids=(2**31,)), "32 bits"),
        (capture(prompt_ids=("a",)), "32 bits"),
        (capture(messages=(Message("user", "\ud800"),)), "valid Unicode"),
        (capture(tools=(Tool("f", parameters={"x": (1,)}),)), "tools cannot be kept"),
        (capture(tool_choice={1: "a"}), "tool_choice cannot be kept"),
        (capture(tool_choice=float("nan")), "tool_choice cannot be kept"),
        (capture(tool_choice={"a": {1, 2}}), "not a JSON type"),
        (capture(tool_choice="\ud800"), "surrogates"),
        (capture(sampling=Sampling(temperature=float("nan"))), "sampling cannot be kept"),
        (capture(index=2**63), "64 bits"),
        (capture(drift="\ud800"), "valid Unicode"),
    ],
)
def test_a_call_that_cannot_be_kept_is_refused(
    store: CaptureStore, captured: CapturedCall, told: str
) -> None:
    store.begin_rollout(begun())
    with pytest.raises(CaptureError, match=told):
        store.commit_call(captured)
    assert count(store) == 0


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        (begun(reward=float("nan")), "reward NaN"),
        (begun(rewards={"a": float("nan")}), "Rollout.rewards"),
        (begun(metadata={"path": Path("x")}), "Rollout.metadata"),
        (begun(started_at=float("nan")), "started_at"),
    ],
)
def test_a_rollout_that_cannot_be_kept_is_refused(
    store: CaptureStore, rollout: Rollout, told: str
) -> None:
    with pytest.raises(CaptureError, match=told):
        store.finish_rollout(rollout)
    assert count(store, "rollouts") == 0


def test_read_only_mappings_are_kept_as_plain_objects(store: CaptureStore) -> None:
    metadata = MappingProxyType({"level": 2, "inner": MappingProxyType({"a": [1]})})
    store.finish_rollout(begun(metadata=metadata))
    assert store.rollout("r").metadata == {"level": 2, "inner": {"a": [1]}}


# --- finding --------------------------------------------------------------------------------


@pytest.fixture
def filled(store: CaptureStore) -> CaptureStore:
    entries = [
        ("aaa1", "keys-1-0", "react", Outcome.COMPLETED),
        ("aab2", "keys-1-1", "react", Outcome.TIME_LIMIT),
        ("abc3", "keys-2-0", "mini", Outcome.COMPLETED),
        ("bcd4", "sql_0%", "mini", Outcome.VERIFIER_ERROR),
    ]
    for i, (rollout_id, task, harness, outcome) in enumerate(entries):
        store.finish_rollout(
            begun(rollout_id, task_id=task, harness=harness, outcome=outcome, started_at=9.0 - i)
        )
    store.begin_rollout(begun("bcd", task_id="keys-1-2", harness="mini"))
    return store


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({}, ["aaa1", "aab2", "abc3", "bcd4", "bcd"]),
        ({"harness": "react"}, ["aaa1", "aab2"]),
        ({"task": "keys-1"}, ["aaa1", "aab2", "bcd"]),
        ({"task": "KEYS"}, []),
        ({"task": "sql_0%"}, ["bcd4"]),
        ({"task": "%"}, []),
        ({"task": ""}, ["aaa1", "aab2", "abc3", "bcd4", "bcd"]),
        ({"outcome": Outcome.COMPLETED}, ["aaa1", "abc3"]),
        ({"outcome": "time_limit"}, ["aab2"]),
        ({"outcome": Outcome.CANCELLED}, []),
        ({"finished": False}, ["bcd"]),
        ({"finished": True, "harness": "mini", "task": "keys"}, ["abc3"]),
        ({"limit": 2}, ["bcd4", "bcd"]),
        ({"limit": 0}, []),
    ],
)
def test_filters(filled: CaptureStore, filters: dict[str, Any], found: list[str]) -> None:
    assert list(filled.rollout_ids(**filters)) == found
    assert [s.rollout_id for s in filled.summaries(**filters)] == found


def test_an_unknown_outcome(filled: CaptureStore) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'completed'"):
        filled.summaries(outcome="complete")


def test_resolve(filled: CaptureStore) -> None:
    assert filled.resolve("aaa1") == "aaa1"
    assert filled.resolve("aaa") == "aaa1"
    assert filled.resolve("bcd") == "bcd"  # exact, though another starts with it
    with pytest.raises(CaptureError, match="2 rollouts .* 'aa' .*'aaa1', 'aab2'.*more of the id"):
        filled.resolve("aa")
    with pytest.raises(CaptureError, match="starts with 'zz'; the newest are 'bcd', 'bcd4'"):
        filled.resolve("zz")
    with pytest.raises(CaptureError, match="no rollout 'aa' in"):
        filled.rollout("aa")


def test_resolve_in_an_empty_store(store: CaptureStore) -> None:
    with pytest.raises(CaptureError, match="it holds none"):
        store.resolve("a")


def test_many_matches_are_cut_short(store: CaptureStore) -> None:
    for i in range(8):
        store.begin_rollout(begun(f"r{i}"))
    with pytest.raises(CaptureError, match="8 rollouts .* and 3 more"):
        store.resolve("r")


def test_closing(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path / "s.sqlite")
    store.close()
    store.close()
    with pytest.raises(CaptureError, match="closed; open it again"):
        store.summaries()
    with pytest.raises(CaptureError, match="closed"):
        store.begin_rollout(begun())
    assert [p.name for p in tmp_path.iterdir()] == ["s.sqlite"]  # no -wal and -shm left
