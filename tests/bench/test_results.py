"""Results: `compare`, and the load that they record."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.benchmark_commands import online_json
from helpers.stub import Script, StubServer
from minisgl_bench import compare, report


def timed(content: dict[str, Any], itl_ms: float) -> dict[str, Any]:
    """Return the result with these times, so that the machine's real times change no verdict."""
    result: dict[str, Any] = copy.deepcopy(content)
    for index, each in enumerate(result["runs"]):
        each["summary"]["itl_ms"]["p50"] = itl_ms + index / 100
        each["summary"]["output_tokens_per_s"] = 1000 / itl_ms + index
    return result


def test_online_results_are_compared_and_drawn(
    start_stub: Callable[[Script], StubServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = start_stub(Script(itl_s=0.001))
    a = online_json(tmp_path, stub, "fast", "--concurrency", "3", "--repeat", "2")
    content = json.loads(a.read_text())
    b = tmp_path / "slow.json"
    for path, itl_ms in ((a, 1.0), (b, 4.0)):
        path.write_text(json.dumps(timed(content, itl_ms)))
    content = json.loads(a.read_text())
    assert content["environment"]["cpu"]
    assert [run["summary"]["num_requests"] for run in content["runs"]] == [6, 6]
    assert "api_key" not in content["target"]
    rows = {row.name: row for row in compare.compare(content, json.loads(b.read_text()))}
    assert rows["itl_ms.p50"].verdict == "worse"
    assert rows["output_tokens_per_s"].verdict == "worse"
    assert (rows["itl_ms.p50"].ratio or 0) > 3
    assert compare.main([str(a), str(b)]) == 0


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


@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        ("duration_s", "worse"),  # which has "ratio" in it
        ("seconds", "worse"),
        ("tokens_per_core_s", "better"),
        ("copy_tb_s", "better"),
        ("of_floor", "better"),
        ("ratio_median", "better"),
    ],
)
def test_compare_knows_what_is_better(key: str, verdict: str) -> None:
    a, b = ({"runs": [{key: value}, {key: value}]} for value in (1.0, 2.0))
    assert [row.verdict for row in compare.compare(a, b)] == [verdict]


def test_compare_knows_lists_by_name_and_warns_of_other_machines() -> None:
    a = {"steps": [{"name": "decode 1", "total_us": 8.0}], "environment": {"cpu": "X"}}
    b = {"steps": [{"name": "decode 64", "total_us": 1.0}, {"name": "decode 1", "total_us": 4.0}]}
    (row,) = compare.compare(a, b)
    assert (row.name, row.ratio) == ("steps.decode 1.total_us", 0.5)
    busy = {"load_before": {"busy_share": 0.9}}
    assert "cpu differs" in compare.cautions(a, b)[0]
    assert "90%" in compare.cautions(a, {**a, **busy})[0]


def test_nothing_to_compare_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(runs(1.0)))
    assert compare.main([str(path), str(path), "--only", "ttft"]) == 0
    assert "ttft_ms.p50" in capsys.readouterr().out
    assert compare.main([str(path), str(path), "--only", "no_such"]) == 2
    assert "matches 'no_such' is in both" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("main", "shown"),
    [
        ("minisgl.__main__", "python -m minisgl bench x"),
        ("minisgl_bench.__main__", "python -m minisgl_bench bench x"),
        (None, "python -m minisgl bench x"),  # the console script
    ],
)
def test_a_result_has_the_command_that_was_typed(
    main: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Mock() if main else None
    if spec:
        spec.name = main
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["minisgl", "bench", "x"])
    assert report.environment()["command"] == shown
