"""`scheduler` in small: host times of the scheduler and the prefix tree."""

from __future__ import annotations

import pytest

from minisgl_bench.studies import prefix_tree, scheduler


def test_scheduler_overhead_small() -> None:
    for kind in ("decode", "mixed"):
        values = scheduler.measure_steps(kind, 4, 30)
        assert all(value > 0 for value in values.values()), values
        assert sum(values[f"{part}_us"] for part in scheduler.PARTS) < 100_000


def test_tree_operations_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "TREE_TOKENS", 50_000)
    rows = list(prefix_tree.measure_tree(16))
    assert len(rows) == 6
    assert all(row["cached_tokens"] >= 50_000 and row["median_us"] > 0 for row in rows)
