"""`scripts/chaos.py` in short: a worker is killed, stopped, paused; clients misbehave."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return SimpleNamespace(**runpy.run_path(str(SCRIPTS / "chaos.py")))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('{"finish_reason":"length"}\n\ndata: [DONE]', "done"),
        ('{"finish_reason":"length"}],"usage":{}}', "done"),
        ('{"finish_reason":null}\n\ndata: {"error":{"code":"worker_died"}}', "worker_died"),
        ('{"finish_reason":null}\n\n', "cut off, 0 ends"),
        ('{"finish_reason":"length"}\n\n', "cut off, 1 ends"),
        ('{"finish_reason":"length"}\n\n{"error":{"code":"worker_died"}}', "cut off, 2 ends"),
        ('{"finish_reason":"stop"}{"finish_reason":"stop"} [DONE]', "cut off, 2 ends"),
    ],
)
def test_an_answer_has_one_end(text: str, end: str, chaos: SimpleNamespace) -> None:
    assert chaos.end_of(text).startswith(end)


def test_every_client_has_an_end(chaos: SimpleNamespace) -> None:
    faults = chaos.FAULTS[:5]
    assert faults == ("kill", "stop", "pause", "slow", "half-close")
    result = chaos.run(num_rounds=5, seed=1, tp=1, restart=True)
    assert result.problems == []
    assert result.rounds == dict.fromkeys(faults, 1)
    assert sum(result.ends.values()) == 5 * chaos.NUM_CLIENTS
    assert result.workers.total() == 3
