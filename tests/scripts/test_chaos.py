"""`scripts/chaos.py` in short: a worker is killed, one is stopped."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


def test_every_client_has_an_end() -> None:
    chaos = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "chaos.py")))
    result = chaos.run(num_rounds=2, seed=1, tp=1, restart=True)
    assert result.problems == []
    assert result.rounds == {"kill": 1, "stop": 1}
    assert sum(result.ends.values()) == 2 * chaos.NUM_CLIENTS
