"""The commands of all benchmarks: flags, errors, help."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from helpers.benchmark_commands import LINES, PACKAGES, main, online_json
from helpers.stub import Script, StubServer
from minisgl.errors import ConfigError
from minisgl_bench import counters, online, report
from minisgl_bench.arguments import command_of
from minisgl_bench.run import benchmarks
from minisgl_bench.run import main as run_main
from minisgl_bench.studies import moe, scheduler


def test_a_sweep_finds_where_the_goodput_breaks(
    start_stub: Callable[[Script], StubServer], tmp_path: Path
) -> None:
    stub = start_stub(Script(itl_s=0.002))
    path = online_json(tmp_path, stub, "s", "--sweep", "100,50", "--slo", "ttft=60000")
    content = json.loads(path.read_text())
    assert [point["rate"] for point in content["points"]] == [50, 100]
    assert content["summary"]["max_rate_per_s"] == 100


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
        (["--think", "nan"], "must be a number of at least 0"),
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
        "drafts --rounds 0",
        "kernels --rounds 0",
        "moe --rounds 0",
        "offline --shape qwen3-0.6b --repeats 0",
        "scheduler --running 1 0",
        "scheduler --steps 1",
        "moe --tokens 8,0",
        "serving --shape qwen3-0.6b --tp 0",
        "startup --runs 0",
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
    ("flags", "says"),
    [("--shapes small,none", "no shape 'none'"), ("--dtypes int8", "no dtype 'int8'")],
)
def test_names_of_a_mixture_that_are_wrong_are_reported(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["moe", *flags.split()])
    assert exit_info.value.code == 2
    assert says in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_reported(
    start_stub: Callable[[Script], StubServer], capsys: pytest.CaptureFixture[str]
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
    command = "python -m minisgl_bench.studies scheduler"
    assert told == f"{command}: --device cuda: torch finds no CUDA device here\n"


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
    assert told.startswith("python -m minisgl_bench.studies moe: --tune ")
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
            main(["offline", "--json", str(path)])
        assert says in capsys.readouterr().err
    (tmp_path / "a").touch()  # meanwhile
    with pytest.raises(ConfigError, match=r"the results cannot be written to .*a/b"):
        report.write_json(tmp_path / "a/b", {})


def test_ctrl_c_makes_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "main", Mock(side_effect=KeyboardInterrupt))
    assert main(["online"]) == 130


def test_a_list_whose_reader_has_left_makes_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "minisgl_bench"]
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_server_that_does_not_start_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "--runs", "1", "--", "--model", "/nowhere"]) == 2
    told = capfd.readouterr().err
    assert "there is no folder /nowhere" in told
    assert "ended with exit code 1 before it was ready" in told
    assert "Traceback" not in told


def test_counters_of_a_server_with_keys() -> None:
    """The page is empty without the key, and the result then had no counters, in silence."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_allowed = self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if is_allowed else 401)
            self.end_headers()
            self.wfile.write(b"steps_total 3\n")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert counters.scrape(url) == {}
        assert counters.scrape(url, "secret") == {"steps_total": 3.0}
        server.shutdown()


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


def test_every_benchmark_says_what_it_is() -> None:
    users, ours = benchmarks(), benchmarks("minisgl_bench.studies")
    assert {"online", "offline", "serving"} <= set(users)
    assert {"scheduler", "drafts", "paired"} <= set(ours)
    assert all(users.values())
    assert all(ours.values())
    assert not set(users) & set(ours)


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


@pytest.mark.parametrize("name", ["attention", "gemms"])
def test_what_times_a_gpu_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert "this times a GPU, and torch finds no CUDA device here" in capsys.readouterr().err


def test_a_package_that_is_missing_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)  # as if it were not installed
    for module in ("minisgl.benchmark.client", "minisgl_bench.online", "minisgl_bench.shards"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert main(["online"]) == 2
    assert capsys.readouterr().err.endswith(
        "minisgl bench online: the package aiohttp is not installed; run pip install "
        "'minisgl[bench]'\n"
    )


def test_no_proxy_is_asked_for_this_machine(
    start_stub: Callable[[Script], StubServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
