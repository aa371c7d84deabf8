"""`scripts/chaos.py` in short: a worker is killed, stopped, paused; clients misbehave."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_client_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    chaos = SimpleNamespace(**runpy.run_path(str(SCRIPTS / "chaos.py")))
    faults = chaos.FAULTS[:5]
    assert faults == ("kill", "stop", "pause", "slow", "half-close")
    result = chaos.run(num_rounds=5, seed=1, tp=1, restart=True)
    assert result.problems == []
    assert result.rounds == dict.fromkeys(faults, 1)
    assert sum(result.ends.values()) == 5 * chaos.NUM_CLIENTS
