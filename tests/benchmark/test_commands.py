from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import http, moe, plots, prefix_tree, scheduler, timeline
from benchmarks.stub import Script
from helpers.stub_thread import StubThread
from minisgl.benchmark import compare, counters, online, report
from minisgl.benchmark.__main__ import benchmarks
from minisgl.benchmark.__main__ import main as run_main
from minisgl.benchmark.arguments import command_of
from minisgl.benchmark.table import RESULTS
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.line_file import StepLog
from minisgl.scheduler.loop import PARTS
from minisgl.scheduler.meter import LoopMeter, StepRecord
from minisgl.testing import InstantExecutor, ListInbox, ListOutbox

LISTS = {package: benchmarks(package) for package in ("benchmarks", "minisgl.benchmark")}
LINES = {name: line for lines in LISTS.values() for name, line in lines.items()}
PACKAGES = {name: package for package, lines in LISTS.items() for name in lines}


def main(argv: list[str]) -> int:
    """Run the benchmark argv[0] of the package that has it."""
    return run_main(argv, PACKAGES.get(argv[0], "minisgl.benchmark"))


def online_json(tmp_path: Path, stub: StubThread, name: str, *flags: str) -> Path:
    path = tmp_path / f"{name}.json"
    sizes = ["--requests", "6", "--input", "4:8", "--output", "5", "--json", str(path)]
    assert online.main(["--url", f"{stub.url}/v1", *sizes, *flags]) == 0
    return path


def timed(content: dict[str, Any], itl_ms: float) -> dict[str, Any]:
    """The same result with these times: what this machine did meanwhile changes no verdict."""
    result: dict[str, Any] = copy.deepcopy(content)
    for index, each in enumerate(result["runs"]):
        each["summary"]["itl_ms"]["p50"] = itl_ms + index / 100
        each["summary"]["output_tokens_per_s"] = 1000 / itl_ms + index
    return result


def test_online_results_are_compared_and_drawn(
    start_stub: Callable[[Script], StubThread], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def test_a_sweep_finds_where_the_goodput_breaks(
    start_stub: Callable[[Script], StubThread], tmp_path: Path
) -> None:
    stub = start_stub(Script(itl_s=0.002))
    path = online_json(tmp_path, stub, "s", "--sweep", "100,50", "--slo", "ttft=60000")
    content = json.loads(path.read_text())
    assert [point["rate"] for point in content["points"]] == [50, 100]
    assert content["summary"]["max_rate_per_s"] == 100
    assert {name for name, _ in plots.draw({"s": content})} == {"s-sweep"}


def test_no_server_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert online.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "start one, or give its --url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "9:3"], "LOW:HIGH"),
        (["--slo", "fast"], "reads like ttft=500"),
        (["--slo", "ttft=nan"], "reads like ttft=500"),
        (["--slo", "ttft=500,tpot=0"], "reads like ttft=500"),
        (["--vocab-size", "100"], "must be a whole number from 101 to 2147483647, got '100'"),
        (["--max-len", "1"], "must be a whole number of at least 2"),
        (["--api-key-env", "MINISGL_NO_SUCH"], "no environment variable 'MINISGL_NO_SUCH'"),
        (["--sweep", "1,x"], "rates as 1,2,4"),
        (["--sweep", "0,1"], "rates as 1,2,4"),
        (["--sweep", "1,nan"], "rates as 1,2,4"),
        (["--sweep", "1,2", "--repeat", "3"], "--repeat does not go with --sweep"),
        (["--think", "-1"], "must be a number of at least 0"),
        (["--rate", "1", "--concurrency", "2"], "one of --rate"),
        (["--workload", "trace"], "go together"),
        (["--requests", "0"], "must be a whole number of at least 1, got '0'"),
        (["--concurrency", "-1"], "must be a whole number of at least 1, got '-1'"),
        (["--turns", "0"], "at least 1"),
        (["--rate", "nan"], "must be a number above 0, got 'nan'"),
        (["--extra", "[]"], "must be a JSON object"),
        (["--extra", "{bad"], "must be a JSON object"),
    ],
)
def test_a_wrong_flag_is_reported(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        online.parse_args(flags)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "ablation chunk --max-len 63",
        "all_reduce --ranks 0",
        "all_reduce --max-bytes 8191",
        "http --repeat 0",
        "kernels --rounds 0",
        "moe --rounds 0",
        "offline --shape qwen3-0.6b --repeats 0",
        "scheduler --running 1 0",
        "scheduler --steps 1",
        "moe --tokens 8,0",
        "serving --shape qwen3-0.6b --tp 0",
        "startup --runs 0",
        "stub --port 99999",
        "stub --tokens-per-chunk 0",
        "stub --stall-every -1",
        "versus_transformers --batch 0",
        "watermark --page-size 0",
        "watermark --page-size 20000",
    ],
)
def test_numbers_out_of_bounds_are_reported(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(command.split())
    assert exit_info.value.code == 2
    assert "must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("stub --itl-s nan", "must be a number of at least 0"),
        ("stub --ttft-s -1", "must be a number of at least 0"),
        ("timeline steps.jsonl --first nan", "must be a number of at least 0"),
        ("compare a.json b.json --only (", "no regular expression: missing )"),
        ("http --input 4000 --output 97", "--output together are at most 4,096 tokens"),
    ],
)
def test_values_that_cannot_be_used_are_reported(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(command.split())
    assert exit_info.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [("--shapes small,none", "no shape 'none'"), ("--dtypes int8", "got 'int8'")],
)
def test_names_of_a_mixture_that_are_wrong_are_reported(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["moe", *flags.split()])
    assert exit_info.value.code == 2
    assert says in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_reported(
    start_stub: Callable[[Script], StubThread], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--workload", "trace", "--trace", "/no/such/trace"]
    assert main(["online", "--url", start_stub(Script()).url, *flags]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "the trace cannot be read: [Errno 2] No such file" in told


def test_errors_that_are_ours_make_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise ConfigError("--device cuda: torch finds no CUDA device here")

    monkeypatch.setattr(scheduler, "main", fail)
    assert main(["scheduler"]) == 2
    told = capsys.readouterr().err
    assert (
        told == "python -m benchmarks scheduler: --device cuda: torch finds no CUDA device here\n"
    )


@pytest.mark.parametrize(
    ("gpu", "says"), [(False, "and torch finds none here"), (True, "needs Triton: pip install")]
)
def test_tiles_cannot_be_tuned_without_gpu_and_triton(
    gpu: bool, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(moe, "find_spec", lambda name: None)
    assert main(["moe", "--tune", "/no/such/table"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("python -m benchmarks moe: --tune ")
    assert says in told


def test_results_that_could_not_be_written_are_reported_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    for path, says in (
        (tmp_path, "is not a file that can"),
        (tmp_path / "a/b", "be written"),
    ):
        with pytest.raises(SystemExit):
            main(["watermark", "--json", str(path)])
        assert says in capsys.readouterr().err
    (tmp_path / "a").touch()  # meanwhile
    with pytest.raises(ConfigError, match=r"the results cannot be written to .*a/b"):
        report.write_json(tmp_path / "a/b", {})


def test_ctrl_c_makes_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "main", Mock(side_effect=KeyboardInterrupt))
    assert main(["compare"]) == 130


def test_a_list_whose_reader_has_left_makes_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "minisgl.benchmark"]
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_server_that_does_not_start_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "--runs", "1", "--", "--model", "/nowhere"]) == 2
    told = capfd.readouterr().err
    assert "there is no folder /nowhere" in told
    assert "ended with exit code 1 before it was ready" in told
    assert "Traceback" not in told


def test_a_port_of_another_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["stub", "--port", str(taken.getsockname()[1])]) == 1
    assert "Address already in use" in capsys.readouterr().err


def test_prometheus_counters_gain() -> None:
    text = (
        '# TYPE a_total counter\na_total 3\nb_total{x="1 }"} 2.5\nwaiting 7\n'
        'h_bucket{le="1"} 9\nh_sum 1e-3\n'
    )
    samples = counters.parse_metrics(text)
    with pytest.raises(ValueError, match="html"):
        counters.parse_metrics("<html><body>Not found</body></html>")
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
    compare.cautions(result, result)  # of old results, too, which say nothing of the load
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


def test_every_benchmark_says_what_it_is() -> None:
    users, ours = benchmarks(), benchmarks("benchmarks")
    assert {"online", "offline", "serving", "compare"} <= set(users)
    assert {"scheduler", "stub", "plots", "ablation"} <= set(ours)
    assert all(users.values())
    assert all(ours.values())
    assert not set(users) & set(ours)


def test_the_steps_of_a_real_loop_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    config = SchedulerConfig(
        num_pages=20, page_size=4, max_seq_len=40, vocab_size=50, eos_ids=frozenset(),
        max_prefill_tokens=16, max_running=3,
    )  # fmt: skip
    loop = Scheduler(config)
    message = UserMsg(
        uid=0, ids=ids_to_bytes([4] * 9), sampling=SamplingParams(max_tokens=20, ignore_eos=True)
    )
    inbox = ListInbox([[message]], more=lambda: [] if loop.runnable else None)
    run(loop, InstantExecutor(), inbox, ListOutbox(), meter=LoopMeter(on_step=log))
    log.close()
    assert timeline.main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/steps.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out/steps.html").read_text()
    assert re.search(r'(?:src|href)=(?!"data:)', page) is None, "it needs another file"

    records = timeline.read_steps(path)
    assert len(records) >= 20
    events = json.loads((tmp_path / "out/steps.trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(records) * (len(PARTS) + 1)
    host = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in complete
        if event["tid"] == timeline.HOST
    )
    overlaps = [min(before[1], after[1]) - after[0] for before, after in itertools.pairwise(host)]
    assert max(overlaps) < 2, "the host does one thing at a time"  # us; times are rounded


def test_a_step_file_that_is_none_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    for content, message in (("", "holds no step"), ("{}\n1\n", "steps.jsonl:1 is no step")):
        path.write_text(content)
        assert timeline.main([str(path)]) == 2
        told = "".join(capsys.readouterr().err.split())  # where it wraps depends on the path
        assert message.replace(" ", "") in told
    record = dict.fromkeys(StepRecord.__struct_fields__, 1)
    path.write_text(json.dumps(record) + '\n{"step":2,"sta')  # killed in the middle of a line
    assert len(timeline.read_steps(path)) == 1


def test_a_step_file_of_another_version_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    record = dict.fromkeys(StepRecord.__struct_fields__, 1)
    older = {name: 1 for name in record if not name.endswith("_pages")}
    path.write_text(f"{json.dumps(record | {'newer': 1})}\n{json.dumps(older)}\n")
    assert timeline.main([str(path)]) == 2
    told = "".join(capsys.readouterr().err.split())  # where it wraps depends on the path
    message = (
        "steps.jsonl:2 lacks these fields: used_pages, cached_pages, num_pages. Another version "
        "of minisgl wrote this log; record it anew, with --log-steps of this one"
    )
    assert told.endswith(message.replace(" ", ""))


@pytest.mark.parametrize("name", PACKAGES)
def test_every_benchmark_and_flag_has_help(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers = []
    parse = argparse.ArgumentParser.parse_args

    def noted(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
        parsers.append(parser)
        return parse(parser, argv)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", noted)
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert exit_info.value.code == 0
    command = "minisgl" if name == "replay" else command_of(PACKAGES[name])
    assert f"usage: {command} {name} " in capsys.readouterr().out
    (parser,) = parsers
    assert parser.description == LINES[name]
    assert [action.dest for action in parser._actions if not action.help] == []


def test_a_benchmark_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput"]) == 2
    told = capsys.readouterr()
    assert "there is no benchmark 'throughput'" in told.err
    assert "  offline " in told.out


@pytest.mark.parametrize("name", ["attention", "gemms", "sampling"])
def test_what_times_a_gpu_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert "this times a GPU, and torch finds no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["online", "versus_transformers"])
def test_a_package_that_is_missing_is_a_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, extra = {
        "online": ("aiohttp", "minisgl[bench]"),
        "versus_transformers": ("transformers", "transformers"),
    }[name]
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    for module in ("client", "online", "shards"):
        monkeypatch.delitem(sys.modules, f"minisgl.benchmark.{module}", raising=False)
    assert main([name]) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        f"minisgl bench {name}: the package {package} is not installed; run pip install '{extra}'\n"
    )


def test_no_proxy_is_asked_for_this_machine(
    start_stub: Callable[[Script], StubThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = start_stub(Script(itl_s=0.001))
    for proxy in ("http://127.0.0.1:9", "socks5://127.0.0.1:9"):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("ALL_PROXY", proxy)
        online_json(tmp_path, stub, "through")
    address = stub.url.removeprefix("http://")
    assert online.main(["--url", address, "--requests", "1", "--input", "4", "--output", "2"]) == 0


def test_a_url_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert online.main(["--url", "http://[::1:99"]) == 2
    assert "start one, or give its --url" in " ".join(capsys.readouterr().err.split())


def test_a_word_is_the_flag_without_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert online.parse_args(["a-model"]).model == "a-model"
    assert online.parse_args(["--requests", "3", "a-model"]).model == "a-model"
    assert online.parse_args([]).model is None
    for argv in (["a", "--model", "b"], ["--model", "b", "a"]):
        with pytest.raises(SystemExit):
            online.parse_args(argv)
        assert "MODEL is given twice: a and --model b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_main(["offline", "qwen9"])
    assert "SHAPE must be one of" in capsys.readouterr().err
