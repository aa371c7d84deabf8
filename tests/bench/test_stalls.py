"""`benchmarks stalls`: times that can be added up by hand, and what a bound does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minisgl.core import Plan
from minisgl_bench.run import main
from minisgl_bench.studies import stalls
from minisgl_bench.studies.stalls import Speed, simulate, spread_arrivals, times_of

SPEED = Speed(times=times_of(rate=17_000, step_ms=10, row_us=30, kv_ns=2, attend_ns=5), host_s=7e-4)


def test_what_a_step_takes() -> None:
    plan = Plan(
        step=0, uids=[0, 1, 2], table_idxs=[0, 1, 2], starts=[9, 99, 1000], ends=[10, 100, 2022],
        token_ids=np.zeros(1024, np.int32), num_decodes=2, sample_rows=[0, 1, 2],
        output_idxs=[0, 0, 0],
    )  # fmt: skip
    attend_s = 1000 * 1022 * 5e-9
    assert SPEED.times.plan_s(plan) == pytest.approx(2e-3 + 1024 / 17_000 + 110 * 2e-9 + attend_s)
    assert SPEED.decode_s(plan) == pytest.approx(10e-3 + 30e-6 + 110 * 2e-9)


def test_one_request_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "lengths_of", lambda workload: [(1024, 3)])
    row = simulate("one", spread_arrivals("one", 0), SPEED, "default")
    assert (row["steps"], row["prompt_steps"]) == (3, 1)
    first_ms = 0.7 + 2 + 1024 / 17
    # The step after is launched while the first computes; then the device is what is waited for.
    decode_ms = [10 + tokens * 2e-6 for tokens in (1025, 1026)]
    assert row["ttft_ms"] == pytest.approx([first_ms] * 2, abs=0.051)
    assert row["itl_ms"][0] == pytest.approx(sum(decode_ms) / 2, abs=0.051)
    assert row["seconds"] == pytest.approx((first_ms + sum(decode_ms)) / 1e3, abs=0.00051)


def test_gaps_stay_within_the_bound_and_a_smaller_bound_costs_throughput() -> None:
    arrivals = spread_arrivals("streams", 0.06)
    rows = {bound: simulate("streams", arrivals, SPEED, bound) for bound in (None, 80.0, 20.0)}
    for bound in (80.0, 20.0):
        assert rows[bound]["share_above"] == 0
        # One decode step of 64 rows, and the bound.
        assert bound < rows[bound]["itl_ms"][2] < bound + 13
    assert rows[None]["itl_ms"][2] > 200
    assert rows[None]["seconds"] < rows[80.0]["seconds"] < rows[20.0]["seconds"]
    assert simulate("streams", arrivals, SPEED, 20.0) == rows[20.0]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "lengths_of", lambda workload: [(100, 4)] * 3)
    path, trace = tmp_path / "stalls.json", tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}
    trace.write_text(json.dumps(row) + "\n" + json.dumps(row | {"timestamp": 5}) + "\n")
    flags = ["stalls", "--bounds", "none,default,7.5", "--json", str(path)]
    assert main([*flags, "--trace", str(trace)], "minisgl_bench.studies") == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["bound_ms"]) for row in rows[:3]] == [
        ("trace x1, no bound", None), ("trace x1, 44.1 ms", 44.1), ("trace x1, 7.5 ms", 7.5)
    ]  # fmt: skip
    assert rows[0]["cached_share"] > 0.4
    assert capsys.readouterr().out.count("ITL p50/p99/max") == 9
    assert main(["stalls"], "minisgl_bench.studies") == 2
    assert "needs --trace FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["stalls", "--bounds", "-1"], "minisgl_bench.studies")
