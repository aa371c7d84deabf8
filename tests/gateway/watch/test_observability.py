"""Metrics, timings, energy, logs, profiles, step logs and the tree's texts of one real server, and
its policy of `max_tokens`."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from helpers.api_requests import CHAT, GENERATE, TEXT, refused
from helpers.power_zones import growing_zone
from helpers.running_server import RunningServer

NUM_PAGES = 64
FLAGS = (
    f"--num-pages {NUM_PAGES} --max-prefill-length 256 --log-format json --log-requests --xray-text"
    " --max-tokens-policy clamp"
)
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    files = ["--log-steps", str(folder / "steps"), "--profile-dir", str(folder / "profiles")]
    zones = folder / "zones"
    zones.mkdir()
    with (
        growing_zone(zones),
        RunningServer(*FLAGS.split(), *files, MINISGL_POWERCAP=str(zones)) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def scrape(http: httpx.Client, at_least: Mapping[str, float] | None = None) -> dict[str, float]:
    """Wait until the samples include the last step and have at least the values of `at_least`.

    Returns the samples by name and labels, without `rank`.
    """
    wanted = {"minisgl_requests_running": 0.0, **(at_least or {})}
    deadline = time.monotonic() + 60
    while True:
        samples = {}
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for name, labels, value, *_ in family.samples:
                labels.pop("rank", None)
                samples[":".join([name, *labels.values()])] = value
        if (
            all(samples.get(name, -1.0) >= value for name, value in wanted.items())
            and not samples["minisgl_requests_running"] + samples["minisgl_requests_open"]
        ):
            return samples
        assert time.monotonic() < deadline, samples
        time.sleep(0.02)


def ask(http: httpx.Client, prompt: Any, num: int, request_id: str = "x") -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": num, "ignore_eos": True}
    response = http.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})
    answer: dict[str, Any] = response.json()
    return answer


def log_of(server: RunningServer) -> list[dict[str, Any]]:
    # What torch writes to stderr by itself: "USDT" of its profiler, "ERROR:" of a CUDA build that
    # finds no driver.
    lines = server.output["err"].splitlines()
    return [json.loads(line) for line in lines if not line.startswith(("USDT", "ERROR:"))]


def test_the_time_between_pieces_of_text_is_counted(http: httpx.Client) -> None:
    """Pieces that come together count as one, so an answer on a busy machine may have none."""
    name = "minisgl_inter_token_seconds_count"
    before, deadline = scrape(http).get(name, 0), time.monotonic() + 60
    while scrape(http).get(name, 0) <= before:
        assert time.monotonic() < deadline, "no time was counted"
        ask(http, [150] * 40, 50)


def test_counters_agree_with_the_requests(http: httpx.Client) -> None:
    before = scrape(http)
    answers = [ask(http, [200] * 100, num) for num in (1, 7, 20)]
    refused = ask(http, [200] * 2000, 5)
    assert refused["error"]["code"] == "context_length_exceeded"
    http.get("/nothing")
    output = "minisgl_output_tokens_total"
    after = scrape(http, {output: before[output] + 28})

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    usages = [answer["usage"] for answer in answers]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, 96, 96]
    assert gained("minisgl_prompt_tokens_total") == 300
    assert gained("minisgl_cached_tokens_total") == sum(cached)
    assert gained("minisgl_prefill_tokens_total") == 300 - sum(cached)
    assert gained("minisgl_output_tokens_total") == 28
    assert gained("minisgl_requests_total:length") == 3
    assert gained("minisgl_requests_total:error") == 1
    assert gained("minisgl_errors_total:context_length_exceeded") == 1
    assert gained("minisgl_errors_total:not_found") == 1
    for name in ("time_to_first_token", "request", "queue"):
        assert gained(f"minisgl_{name}_seconds_count") == 3, name
    assert gained("minisgl_inter_token_seconds_count") <= 25
    queued = sum(answer["timings"]["queued_s"] for answer in answers)
    assert gained("minisgl_queue_seconds_sum") == pytest.approx(queued, abs=1e-5)
    # A step gives a request one token, and one more for each right draft.
    assert gained("minisgl_steps_total") + gained("minisgl_accepted_total") >= 28
    assert gained("minisgl_step_seconds_total:wait") > 0
    assert after["minisgl_requests_open"] == after["minisgl_requests_waiting"] == 0
    pages = {state: after[f"minisgl_kv_pages:{state}"] for state in ("used", "cached", "free")}
    assert (pages["used"], sum(pages.values())) == (0, NUM_PAGES)
    assert pages["cached"] >= 100 // 16
    prefix = "minisgl_start_seconds:"
    start_s = {name.removeprefix(prefix): after[name] for name in after if name.startswith(prefix)}
    assert list(start_s) == [
        *("launch", "imports", "tokenizer", "device", "kernels", "weights", "memory", "measuring"),
        *("graphs", "scheduler", "others"),
    ]
    assert min(start_s.values()) >= 0
    assert 0 < start_s["imports"] < sum(start_s.values())
    [info] = [name for name in after if name.startswith("minisgl_build_info")]
    assert "minisgl-builtin" in info


def test_the_metrics_page_in_openmetrics(http: httpx.Client) -> None:
    response = http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert {f.name for f in parse_openmetrics(response.text)} >= {"minisgl_steps"}


def test_timings_add_up_to_what_the_client_measures(client: openai.OpenAI) -> None:
    shares = [0.0]
    while max(shares) <= 0.8 and len(shares) < 20:  # a busy machine makes the client wait, too
        start = time.perf_counter()
        answer = client.chat.completions.create(
            model="minisgl-builtin",
            messages=[{"role": "user", "content": "What is a radix cache?"}],
            max_tokens=150,
            extra_body={"ignore_eos": True},
        )
        seconds = time.perf_counter() - start
        assert answer.model_extra
        timings = answer.model_extra["timings"]
        phases = timings["queued_s"] + timings["prefill_s"] + timings["decode_s"]
        shares.append((phases + 0.05) / seconds)
        assert phases < seconds
    assert max(shares) > 0.8, shares
    assert (timings["num_chunks"], timings["num_retractions"]) == (1, 0)


def test_device_time_and_energy(http: httpx.Client, server: RunningServer) -> None:
    names = ("minisgl_energy_joules_total", "minisgl_device_seconds_total")
    before = scrape(http)
    energy = device_s = 0.0
    deadline = time.monotonic() + 120
    while not energy:  # a busy machine may hold up the thread of the counter for an answer
        assert time.monotonic() < deadline
        timings = ask(http, "Hello", 200, request_id="powered")["timings"]
        assert 0 < timings["device_s"] <= 1.01 * (timings["prefill_s"] + timings["decode_s"])
        energy += timings["energy_j"]
        device_s += timings["device_s"]
    after = scrape(http)
    gained = [after[name] - before[name] for name in names]
    assert gained == [pytest.approx(energy, abs=1e-4), pytest.approx(device_s, abs=1e-4)]
    server.wait_for('("id": "powered")', "err")
    assert all("energy_j" in line for line in log_of(server) if line.get("id") == "powered")


def test_frames_have_the_texts_of_the_tree_where_the_operator_asks(http: httpx.Client) -> None:
    ask(http, "What is a radix cache, and what does it keep for whom? " * 3, 40)
    with http.stream("GET", "/xray/events") as frames:
        for line in frames.iter_lines():
            frame = json.loads(line.removeprefix("data: ") or "{}") if "data:" in line else {}
            if frame.get("tree"):
                break
    assert any(text.startswith("What is a radix cache") for text in frame["texts"])


def test_a_request_in_the_log(http: httpx.Client, server: RunningServer) -> None:
    answer = ask(http, [300] * 300, 5, request_id="find-me")
    server.wait_for('("id": "find-me")', "err")
    [line] = [line for line in log_of(server) if line.get("id") == "find-me"]
    expected = {"level": "info", "process": "server", "message": "request", "reason": "length"}
    assert line.items() >= expected.items()
    assert (line["prompt_tokens"], line["output_tokens"], line["chunks"]) == (300, 5, 2)
    assert line["decode_ms"] == pytest.approx(answer["timings"]["decode_s"] * 1e3, abs=0.002)
    assert line["queued_ms"] + line["prefill_ms"] + line["decode_ms"] <= line["total_ms"]
    assert line["ttft_ms"] <= line["total_ms"]


def test_log_lines_of_other_packages(http: httpx.Client, server: RunningServer) -> None:
    address = http.base_url
    with socket.create_connection((address.host, address.port or 0)) as client:
        client.sendall(b"HELLO\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    server.wait_for("(Invalid HTTP request)", "err")
    [line] = [line for line in log_of(server) if "Invalid HTTP" in line["message"]]
    assert (line["level"], line["process"]) == ("warning", "server")


def test_a_far_too_long_text_is_refused_after_its_beginning(http: httpx.Client) -> None:
    refused = http.post("/generate", json={"text": "one two " * 30_000})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert re.search(r"240,000 characters, of which the first [\d,]+ are", error["message"])


def test_websockets_are_not_offered(http: httpx.Client, server: RunningServer) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert http.get("/health", headers=upgrade).status_code == 200
    assert http.get("/nothing", headers=upgrade).status_code == 404
    address = http.base_url
    with socket.create_connection((address.host, address.port or 0)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n")
        time.sleep(0.05)
        client.sendall(b"Upgrade: websocket\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    server.wait_for("(Unsupported upgrade request)", "err")
    assert not [line for line in log_of(server) if "WebSocket" in line["message"]]


def test_a_profile(http: httpx.Client, folder: Path) -> None:
    assert http.post("/stop_profile").status_code == 409
    assert http.post("/start_profile").json() == {"status": "profiling"}
    again = http.post("/start_profile")
    assert again.status_code == 409
    assert "running already" in again.json()["error"]["message"]
    ask(http, [7] * 40, 5, request_id="profiled")
    stopped = http.post("/stop_profile").json()
    assert stopped["num_steps"] >= 5
    [uid] = [uid for uid, name in stopped["requests"].items() if name == "profiled"]
    [trace] = (folder / "profiles").iterdir()
    assert str(trace) == stopped["trace"]
    assert stopped["traces"] == [str(trace)]
    events = json.loads(trace.read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("step ")}
    assert len(steps) == stopped["num_steps"]
    assert sum("0 decodes, 40 prompt tokens" in name for name in steps) == 1
    assert all(name.endswith(f"; {uid}") for name in steps)
    assert any(event["name"].startswith("aten::") for event in events)
    assert http.post("/stop_profile").status_code == 409


def test_steps_in_a_file(http: httpx.Client, folder: Path) -> None:
    output = "minisgl_output_tokens_total"
    before = scrape(http)[output]
    ask(http, [500] * 50, 10)
    total = scrape(http, {output: before + 10})
    steps = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert len(steps) == total["minisgl_steps_total"]
    assert sum(s["output_tokens"] for s in steps) == total["minisgl_output_tokens_total"]
    prefill = sum(step["tokens"] - step["decodes"] for step in steps)
    assert prefill == total["minisgl_prefill_tokens_total"]
    for step in steps:
        assert step["start_s"] <= step["settle_s"]
        assert step["wait_us"] >= 0
    for part in ("plan", "launch", "wait", "commit"):  # what no step did is in other turns
        seconds = sum(step[f"{part}_us"] for step in steps) / 1e6
        assert 0 < seconds <= 1.001 * total[f"minisgl_step_seconds_total:{part}"] + 1e-3


def test_the_status_line(http: httpx.Client, server: RunningServer) -> None:
    ask(http, [400], 5)
    server.wait_for('("message": "status")', "err")
    status = [line for line in log_of(server) if line["message"] == "status"]
    assert status[0].keys() >= {"running", "waiting", "decode_tokens_per_s", "kv_used", "busy"}
    assert status[0]["process"] == "engine"


def test_the_dashboard_asks_for_metrics_that_exist(http: httpx.Client) -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"minisgl_\w+", " ".join(queries)))
    assert len(asked) >= 15
    bare = [query for query in queries if "process_" in query and "minisgl_build_info" not in query]
    assert bare == []  # every program that Prometheus reads has process_*
    http.get("/nothing")  # a code has a counter once it was seen
    there = {name.split(":")[0] for name in scrape(http)}
    assert asked <= there
    documented = (DOCS / "observability.md").read_text()
    families = {re.sub("_(bucket|count|sum)$", "", n) for n in there if n.startswith("minisgl_")}
    assert [name for name in sorted(families) if f"`{name}" not in documented] == []


TURN = [{"role": "user", "content": "hi"}]
BEYOND: dict[str, tuple[str, dict[str, Any]]] = {  # a path: our max_tokens, a request
    CHAT: ("max_tokens", {"messages": TURN}),
    TEXT: ("max_tokens", {"prompt": "hi"}),
    GENERATE: ("max_tokens", {"text": "hi"}),
    "/v1/responses": ("max_output_tokens", {"input": "hi"}),
    "/v1/messages": ("max_tokens", {"messages": TURN}),
    "/api/chat": ("options.num_predict", {"messages": TURN, "model": "minisgl-builtin"}),
}
ALWAYS_CLAMP = ("/v1/messages", "/api/chat")


def test_max_tokens_beyond_the_context_is_lowered_in_every_api(
    http: httpx.Client, builtin: RunningServer
) -> None:
    with httpx.Client(base_url=builtin.url) as refuses:
        for path, (name, body) in BEYOND.items():
            for many, is_lowered in ((32_000, True), (3, False)):
                *outer, inner = name.split(".")
                limit: dict[str, Any] = {inner: many}
                asked = body | ({outer[0]: limit} if outer else limit)
                for stream in (False, True):
                    with http.stream("POST", path, json=asked | {"stream": stream}) as answer:
                        assert answer.status_code == 200, (path, answer.read())
                        warning = answer.headers.get("x-minisgl-warning", "")
                    words, _, number = warning.rpartition(" ")
                    assert words == (f"{name} lowered to" if is_lowered else ""), path
                    assert not is_lowered or 900 < int(number) < 1024, warning
                if is_lowered and path not in ALWAYS_CLAMP:
                    assert "max_" in refused(refuses.post(path, json=asked))["param"]
