"""Results: `compare`, the report of `plots`, and the load that they record."""

from __future__ import annotations

import copy
import importlib
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers.benchmark_commands import PACKAGES, main, online_json
from minisgl_bench import compare, report
from minisgl_bench.studies import plots
from minisgl_bench.studies.stub import Script, StubServer
from minisgl_bench.table import RESULTS


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

    out = tmp_path / "plots"
    assert plots.main([str(a), str(b), "--out", str(out)]) == 0
    assert (out / "latency.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert re.search(r'(?:src|href)=(?!"data:)', page) is None, "it needs another file"


def test_results_of_one_name_are_both_shown(tmp_path: Path) -> None:
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        content = {"rows": [{"name": folder, "us": 1.0}]}
        (tmp_path / folder / "moe.json").write_text(json.dumps(content))
    paths = [tmp_path / "before" / "moe.json", tmp_path / "after" / "moe.json"]
    assert plots.main([*map(str, paths), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == ["before-moe", "after-moe"]
    assert "<td>before</td>" in page
    assert "<td>after</td>" in page
    # One file is one result however it is called, and one name needs no folder.
    same = tmp_path / "before" / ".." / "after" / "moe.json"
    assert plots.names_of([paths[1], same]).keys() == {"moe"}


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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_compare_tells_the_rows_of_every_result_apart(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compare.read_result(path)
    compare.cautions(result, result)  # old results have no load
    names = [row.name for row in compare.compare(result, result)]
    for field in ("rows", "steps", "variants", "points", "tree"):
        labels = [compare._name_of(item) for item in result.get(field, [])]
        assert len(set(labels)) == len(labels), (field, labels)
        for label in labels:
            assert any(name.startswith(f"{field}.{label}.") for name in names), (field, label)
    assert compare.main([str(path), str(path)]) == 0
    lines = [line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert not set(names) - set(lines), "piped, a name is cut"


LOAD = {"busy_share": 0.5, "load_1min": 1.0}
STARTED = {"ready_s": 1.0, "first_token_s": 2.0, "part_s": {"weights": 0.1}}


def nothing(*_: Any, **__: Any) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("command", "measuring"),
    [
        ("all_reduce --ranks 1", {"_run_ranks": nothing}),
        ("attention", {"card_rates": dict, "measure": nothing}),
        ("kernels", {"attention": nothing, "ops": nothing}),
        ("moe", {"_on_cpu": nothing, "_on_gpu": nothing}),
        ("offline --shape tiny", {"_measure": nothing}),
        ("gemms", {"card_rates": dict, "measure_layer": nothing}),
        ("sampling", {"card_rates": lambda: {"copy_tb_s": 4.0}, "KINDS": ()}),
        ("startup", {"_start_once": lambda flags: STARTED}),
        ("versus_transformers", {"_compare": nothing}),
    ],
)
def test_results_say_how_busy_the_machine_was(
    command: str, measuring: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"{PACKAGES[command.split()[0]]}.{command.split()[0]}")
    monkeypatch.setattr(module, "machine_load", lambda: LOAD)
    monkeypatch.setattr(module, "setup_logging", Mock(), raising=False)  # it is the process's
    for name, stub in measuring.items():
        monkeypatch.setattr(module, name, stub)
    if "card_rates" in measuring:  # it is for GPUs alone
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "Stream", Mock())
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(report, "_gpu_name", lambda: None)
    path = tmp_path / "result.json"
    assert main([*command.split(), "--json", str(path)]) == 0
    result = compare.read_result(path)
    assert result["load_before"] == LOAD
    assert compare.cautions(result, result)[0] == "A ran while other work took 50% of the machine"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_report_has_the_rows_of_every_result(path: Path) -> None:
    result = compare.read_result(path)
    page = plots.report({path.stem: result}, {})
    for field in ("rows", "runs", "steps", "variants", "points", "tree"):
        assert page.count("<tr>") >= len(result.get(field, [])), field


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
