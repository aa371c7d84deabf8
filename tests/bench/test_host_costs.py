"""`scheduler` and `http` in small: host times of the scheduler, the prefix tree and HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl_bench.studies import http, prefix_tree, scheduler


def test_scheduler_overhead_small() -> None:
    for kind in ("decode", "mixed"):
        values = scheduler.measure_steps(kind, 4, 30)
        assert all(value > 0 for value in values.values()), values
        assert sum(values[f"{part}_us"] for part in scheduler.PARTS) < 100_000
    found = scheduler.measure_overlap(4, device_s=0.001, steps=30)
    assert found["overlap_step_ms"] >= 0.999
    assert found["no_overlap_step_ms"] > 1


def test_tree_operations_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "TREE_TOKENS", 50_000)
    rows = list(prefix_tree.measure_tree(16))
    assert len(rows) == 6
    assert all(row["cached_tokens"] >= 50_000 and row["median_us"] > 0 for row in rows)


def test_the_trees_share_of_scheduling() -> None:
    radix, naive = prefix_tree.measure_share("radix", 60), prefix_tree.measure_share("naive", 60)
    # 28 of 60 requests find their system prompt, a quarter of their tokens.
    assert radix["cached_tokens_share"] == pytest.approx(28 / 60 / 4, abs=1e-4)
    assert naive["cached_tokens_share"] == 0
    assert 0 < radix["cache_share"] < 1


def test_what_http_costs_small(tmp_path: Path) -> None:
    path = tmp_path / "http.json"
    sizes = ["--requests", "4", "--input", "4:8", "--output", "20", "--step-ms", "2"]
    assert http.main([*sizes, "--repeat", "1", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    (measured,) = content["runs"]  # the one to warm up is not kept
    assert measured["summary"]["num_output_tokens"] == 4 * 20
    assert set(measured["cpu_s"]) == {"api", "scheduler", "tokenizer-0", "detokenizer", "client"}
    # 20 steps of 2 ms at least, and HTTP makes nothing faster than the device.
    assert content["offline_s"] >= 0.04
    assert measured["summary"]["duration_s"] >= 0.04
    assert measured["share_kept"] > 0
