"""`benchmarks chunks`: times that can be added up by hand, and what the scheduler's sizes do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import chunks
from benchmarks.chunks import Speed, simulate
from minisgl.benchmark.__main__ import main
from minisgl.core import Plan

SPEED = Speed(
    step_s=1e-3, row_s=4e-6, kv_s=26e-9, rate=4e5, host_s=3e-4, replay_s=4e-4, launch_s=0.013
)


def test_what_a_step_takes() -> None:
    plan = Plan(
        step=0, uids=[0, 1, 2], table_idxs=[0, 1, 2], starts=[9, 99, 0], ends=[10, 100, 50],
        token_ids=np.zeros(52, np.int32), num_decodes=2, sample_rows=[0, 1, 2],
        output_idxs=[0, 0, 0],
    )  # fmt: skip
    assert SPEED.device_s(plan) == pytest.approx(1e-3 + 2 * 4e-6 + 110 * 26e-9 + 50 / 4e5)
    assert SPEED.launching_s(plan) == pytest.approx(0.0133)


def test_one_request_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "lengths_of", lambda workload: [(1000, 3)])
    row = simulate("one", 4096, SPEED)
    assert (row["steps"], row["prompt_steps"]) == (3, 1)
    first_ms = 0.3 + 13 + 1 + 1000 / 400  # launched, computed
    # The step after is launched while the first computes; then the device is what is waited for.
    decodes_ms = [1 + 0.004 + tokens * 26e-6 for tokens in (1001, 1002)]
    assert row["ttft_ms"] == pytest.approx([first_ms] * 2, abs=0.051)
    assert row["itl_ms"][0] == pytest.approx(sum(decodes_ms) / 2, abs=0.0051)
    assert row["seconds"] == pytest.approx((first_ms + sum(decodes_ms)) / 1e3, abs=0.00051)


def test_launching_is_what_a_small_chunk_costs() -> None:
    slow = {chunk: simulate("throughput", chunk, SPEED) for chunk in (1024, 4096, 8192)}
    assert slow[1024]["prompt_steps"] > 2 * slow[4096]["prompt_steps"]
    assert slow[1024]["seconds"] > slow[4096]["seconds"] > slow[8192]["seconds"]
    assert slow[1024]["itl_ms"][1] < slow[4096]["itl_ms"][1] < slow[8192]["itl_ms"][1]
    assert simulate("throughput", 4096, SPEED) == slow[4096]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "lengths_of", lambda workload: [(100, 4)] * 3)
    path = tmp_path / "chunks.json"
    assert main(["chunks", "--chunks", "64,128", "--json", str(path)], "benchmarks") == 0
    assert len(json.loads(path.read_text())["rows"]) == 6
    assert capsys.readouterr().out.count("ITL p50/p99/max") == 6
    assert main(["chunks", "--workloads", "all"], "benchmarks") == 2
    assert "there is no workload 'all'" in capsys.readouterr().err
