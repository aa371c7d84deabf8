from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_thread import StubThread

from minisgl.benchmark import compare, counters, online, plots, prefix_tree, scheduler
from minisgl.benchmark.__main__ import benchmarks
from minisgl.benchmark.stub import Script


def online_json(tmp_path: Path, stub: StubThread, name: str, *flags: str) -> Path:
    path = tmp_path / f"{name}.json"
    sizes = ["--requests", "6", "--input", "4:8", "--output", "5", "--json", str(path)]
    assert online.main(["--url", stub.url, *sizes, *flags]) == 0
    return path


def test_online_results_are_compared_and_drawn(
    start_stub: Callable[[Script], StubThread], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = start_stub(Script(itl_s=0.001)), start_stub(Script(itl_s=0.02))
    a = online_json(tmp_path, fast, "fast", "--concurrency", "3", "--repeat", "2")
    b = online_json(tmp_path, slow, "slow", "--concurrency", "3", "--repeat", "2")
    content = json.loads(a.read_text())
    assert content["environment"]["cpu"]
    assert [run["summary"]["num_requests"] for run in content["runs"]] == [6, 6]
    assert "api_key" not in content["target"]
    rows = {row.name: row for row in compare.compare(content, json.loads(b.read_text()))}
    assert rows["itl_ms.p50"].verdict == "worse"
    assert rows["output_tokens_per_s"].verdict == "worse"
    assert (rows["itl_ms.p50"].ratio or 0) > 3
    assert compare.main([str(a), str(b)]) == 0

    out = tmp_path / "plots"
    assert plots.main([str(a), str(b), "--out", str(out)]) == 0
    assert (out / "latency.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert re.search(r'(?:src|href)=(?!"data:)', page) is None, "it needs another file"


def test_a_sweep_finds_where_the_goodput_breaks(
    start_stub: Callable[[Script], StubThread], tmp_path: Path
) -> None:
    stub = start_stub(Script(itl_s=0.002))
    path = online_json(tmp_path, stub, "s", "--sweep", "50,100", "--slo", "ttft=500")
    content = json.loads(path.read_text())
    assert [point["rate"] for point in content["points"]] == [50, 100]
    assert content["summary"]["max_rate_per_s"] == 100
    assert {name for name, _ in plots.draw({"s": content})} == {"s-sweep"}


def test_no_server_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert online.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "start one, or say --url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "9:3"], "LOW:HIGH"),
        (["--slo", "fast"], "reads like ttft=500"),
        (["--sweep", "1,x"], "rates as 1,2,4"),
        (["--rate", "1", "--concurrency", "2"], "one of --rate"),
        (["--workload", "trace"], "go together"),
    ],
)
def test_a_wrong_flag_is_told(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        online.parse_args(flags)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_prometheus_counters_gain() -> None:
    text = (
        '# TYPE a_total counter\na_total 3\nb_total{x="1 }"} 2.5\nwaiting 7\n'
        'h_bucket{le="1"} 9\nh_sum 1e-3\n'
    )
    samples = counters.parse_metrics(text)
    assert samples["a_total"] == 3
    assert samples['b_total{x="1 }"}'] == 2.5
    gained = counters.difference({"a_total": 1.0, "waiting": 1.0}, samples)
    assert gained == {"a_total": 2.0, 'b_total{x="1 }"}': 2.5, "h_sum": 0.001}


def runs(*values: float, key: str = "ttft_ms") -> dict[str, Any]:
    return {"runs": [{"summary": {key: {"p50": value}}} for value in values]}


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((1.0, 1.2), (1.1, 1.3), "noise"),
        ((1.0, 1.2), (1.3, 1.4), "worse"),
        ((1.3, 1.4), (1.0, 1.2), "better"),
        ((1.0, 1.2), (9.0,), "one run"),
    ],
)
def test_a_difference_counts_only_beyond_the_noise(
    a: tuple[float, ...], b: tuple[float, ...], verdict: str
) -> None:
    (row,) = compare.compare(runs(*a), runs(*b))
    assert (row.name, row.verdict) == ("ttft_ms.p50", verdict)


def test_compare_knows_lists_by_name_and_warns_of_other_machines() -> None:
    a = {"steps": [{"name": "decode 1", "total_us": 8.0}], "environment": {"cpu": "X"}}
    b = {"steps": [{"name": "decode 64", "total_us": 1.0}, {"name": "decode 1", "total_us": 4.0}]}
    (row,) = compare.compare(a, b)
    assert (row.name, row.ratio) == ("steps.decode 1.total_us", 0.5)
    busy = {"load_before": {"busy_share": 0.9}}
    assert "cpu differs" in compare.cautions(a, b)[0]
    assert "90%" in compare.cautions(a, {**a, **busy})[0]


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


def test_every_benchmark_says_what_it_is() -> None:
    found = benchmarks()
    assert {"online", "scheduler", "stub", "compare", "plots", "ablation"} <= set(found)
    assert all(found.values())
