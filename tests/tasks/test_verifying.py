from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.errors import VerifierError
from clawgym_env.tasks import VerifierResult, parse_score


@pytest.mark.parametrize(
    ("stdout", "reward", "rewards"),
    [
        (b"1", 1.0, {}),
        (b"0\n", 0.0, {}),
        (b"0.25\n\n  \n", 0.25, {}),
        (b"checking\xff\n5 of 6\n 1e-3 \r\n", 0.001, {}),
        (b'{"reward": 1}', 1.0, {}),
        (b'{"reward": 0.5, "rewards": {"a": 1, "seconds": -3.5}}', 0.5, {"a": 1, "seconds": -3.5}),
    ],
)
def test_scores(stdout: bytes, reward: float, rewards: dict[str, float]) -> None:
    assert parse_score(stdout) == VerifierResult(reward, rewards)


@pytest.mark.parametrize(
    ("stdout", "text"),
    [
        (b"", "printed nothing"),
        (b" \n\n", "printed nothing"),
        (b"1\nTraceback (most recent call last)", "last line is 'Traceback"),
        (b"nan", "last line is 'nan'"),
        (b"NaN", "reward is nan; expected a finite number"),
        (b"Infinity", "reward is inf"),
        (b"1e999", "reward is inf"),
        (b"1" + b"0" * 400, "expected a finite number"),
        (b"9" * 9000, "last line is"),
        (b"1.0000001", "expected 0 to 1"),
        (b"-0.1", "expected 0 to 1"),
        (b"true", "reward is True"),
        (b"null", "reward is None"),
        (b'"1"', "reward is '1'"),
        (b"[1]", "reward is [1]"),
        (b"[" * 100_000, "last line is '[[["),
        (b"{}", "fields []"),
        (b'{"reward": 1, "rewrads": {}}', "fields ['reward', 'rewrads']"),
        (b'{"reward": NaN}', "reward is nan"),
        (b'{"reward": 1, "rewards": 3}', "rewards are 3"),
        (b'{"reward": 1, "rewards": {"a": Infinity}}', "rewards['a'] is inf"),
        (b'{"reward": 1, "rewards": {"a": "x"}}', "rewards['a'] is 'x'"),
    ],
)
def test_anything_else_is_an_error_and_no_zero(stdout: bytes, text: str) -> None:
    with pytest.raises(VerifierError) as caught:
        parse_score(stdout)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 1000


@given(
    st.floats(0, 1), st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False))
)
def test_json_scores_come_back_exactly(reward: float, rewards: dict[str, float]) -> None:
    line = json.dumps({"reward": reward, "rewards": rewards}).encode()
    assert parse_score(b"noise\n" + line + b"\n") == VerifierResult(reward, rewards)


@given(st.binary())
def test_garbage_never_raises_anything_else(stdout: bytes) -> None:
    try:
        result = parse_score(stdout)
    except VerifierError:
        return
    assert 0.0 <= result.reward <= 1.0
