"""`scripts/outlive.py` in short: an engine is killed, raises an error, is stopped."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def outlive(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("PYTHONPATH", "BREAKER"):  # the script changes them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return SimpleNamespace(**runpy.run_path(str(SCRIPTS / "outlive.py")))


def test_answers_differ_if_anything_does(outlive: SimpleNamespace) -> None:
    def of(*deltas: object, **fields: object) -> object:
        answer = outlive.Answer()
        for delta in deltas:
            answer.take({"choices": [{"index": 0, "delta": delta, **fields}]})
        return answer

    whole = of({"content": "six seven"})
    assert of({"content": "six"}, {"content": " seven"}).difference(whole) == ""
    for other in (
        of({"content": "six"}),
        of({"content": "six seven"}, {"content": " seven"}),
        of({"content": "six seven"}, finish_reason="stop"),
        of({"content": "six seven"}, {"tool_calls": [{"index": 0, "function": {"name": "a"}}]}),
        of({"content": "six seven"}, logprobs={"token_logprobs": [-1.0]}),
    ):
        assert other.difference(whole)
    near, far = (of({}, logprobs={"token_logprobs": [value]}) for value in (-1.0, -1.1))
    assert near.difference(near) == ""
    assert near.difference(far)


def test_ids_may_differ_at_a_near_tie(
    outlive: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ties = outlive.near_ties.NearTies("", "bfloat16", {"greedy behind 1": ([1, 2], [-1.0, -1.0])})
    scores = {2: -1.0, 3: -1.2, 4: -3.0}
    monkeypatch.setattr(ties._comparer, "_scores", lambda request, ids, tokens: scores)
    assert ties.difference("greedy behind 1", [1, 2], [-1.0, -1.1]) == ""
    assert ties.difference("greedy behind 1", [1, 3], [-1.0, -1.2]) == ""
    assert "which the reference prefers by 2" in ties.difference(
        "greedy behind 1", [1, 4], [-1.0, -3.0]
    )
    assert ties.difference("greedy behind 1", [1], [-1.0]) == "1 ids"
    assert len(ties.seen.ties) == 1


def test_every_answer_outlives_its_engine(outlive: SimpleNamespace) -> None:
    result = outlive.run(num_rounds=4, seed=4, tp=1)
    assert result.problems == []
    assert result.faults == dict.fromkeys(
        ("kill engine", "error engine", "memory engine", "stop engine"), 1
    )
    assert result.resumed.total() >= 3
    assert result.num_comments >= 1
