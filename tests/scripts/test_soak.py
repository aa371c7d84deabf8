"""`scripts/soak.py` in short, ten times what is computed at once. Other tests are neighbours."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return SimpleNamespace(**runpy.run_path(str(SCRIPTS / "soak.py")))


def test_overload_breaks_nothing(soak: SimpleNamespace) -> None:
    result = soak.run(seconds=3, seed=1, num_neighbours=0)
    assert not result.problems
    assert {kind for kind, _, end in (key.partition(": ") for key in result.ends)} == {
        *soak.KINDS,
        "/health",
        "/ready",
    }
    assert sum(n for end, n in result.ends.items() if end.endswith("429")) > soak.ROWS
    assert result.growth < 0.2
    assert json.dumps(soak.as_json(result))


OK = "HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("kind", "answer", "problem"),
    [
        ("short", f"{OK}data: [DONE]", ""),
        ("short", f"{OK}data: a", "cut off"),
        ("short", f'{OK}data: {{"error":{{"code":"queue_timeout"}}}}', ""),
        ("short", f'{OK}data: {{"error":{{"code":"engine_error"}}}}', "ends with engine_error"),
        ("short", "HTTP/1.1 500 Oops\r\n\r\n", "500 status"),
        ("short", "HTTP/1.1 503 Busy\r\nRetry-After: 1\r\n\r\n", ""),
        ("short", "HTTP/1.1 503 Busy\r\n\r\n", "without Retry-After"),
        ("short", "", "no status"),
        ("bad", "HTTP/1.1 400 Bad\r\n\r\n", ""),
        ("bad", "HTTP/1.1 429 Full\r\nRetry-After: 1\r\n\r\n", ""),
        ("bad", OK, "200 for a bad request"),
        (
            "grammar",
            OK
            + json.dumps(
                {"choices": [{"message": {"content": '{"x": 1}'}, "finish_reason": "stop"}]},
                separators=(",", ":"),
            )
            + '"usage":{',
            "not of the schema",
        ),
    ],
)
def test_what_is_wrong_is_found(
    soak: SimpleNamespace, kind: str, answer: str, problem: str
) -> None:
    found = soak.end_of(kind, answer)[1]
    assert problem in found
    assert bool(problem) == bool(found)
