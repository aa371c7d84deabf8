"""Histograms, the meter of the loop and its status line, without a server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest.mock import create_autospec

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.parser import text_string_to_metric_families

from minisgl.core import Finished, Plan, SamplingParams
from minisgl.errors import ConfigError
from minisgl.message import SchedulerMsg, StatusReply, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.loop import PARTS
from minisgl.scheduler.meter import LoopMeter
from minisgl.server.api.metrics import MetricsPage
from minisgl.server.clients import Origin
from minisgl.server.observe import LONG, Histogram, Observer
from minisgl_bench.fakes import FakeExecutor, ListInbox, ListOutbox


def test_a_histogram_equals_the_librarys() -> None:
    ours = Histogram(LONG)
    theirs = TheirHistogram("h", "help", buckets=LONG, registry=CollectorRegistry())
    rng = np.random.default_rng(0)
    for value in [*np.exp(rng.normal(-2, 3, 300)).tolist(), *LONG, 0.0]:
        ours.observe(value)
        theirs.observe(value)
    [family] = theirs.collect()
    buckets = [s.value for s in family.samples if s.name == "h_bucket"]
    assert np.cumsum(ours.counts).tolist() == buckets
    [total] = [s.value for s in family.samples if s.name == "h_sum"]
    assert ours.sum == pytest.approx(total)


def test_a_request_waits_since_its_last_text() -> None:
    observer, now = Observer(), time.perf_counter()
    observer.submitted([0, 1], Origin(), SamplingParams(), now - 1000)
    assert observer.oldest_token_age_s >= 1000
    observer.text(0, now)
    assert observer.oldest_token_age_s >= 1000
    observer.text(1, now - 100)
    assert 100 <= observer.oldest_token_age_s < 1000


def test_costs_of_requests_add_up() -> None:
    observer = Observer()
    observer.submitted([0, 1, 2], Origin(), SamplingParams(), 0.0)
    for uid, cost in enumerate([(1.0, 30.0), (0.5, 20.0), None]):
        end = Finished(uid=uid, reason="stop", num_prompt_tokens=1, num_output_tokens=1, cost=cost)
        observer.finished(end, 1.0)
    assert observer.cost == (1.5, 50.0)


def serve(meter: LoopMeter, *, overlap: bool) -> tuple[Scheduler, float]:
    """20 requests of 9 prompt and 5 output tokens through the loop; returns its seconds."""
    config = SchedulerConfig(
        num_pages=64,
        page_size=4,
        max_seq_len=64,
        vocab_size=100,
        eos_ids=frozenset(),
        max_prefill_tokens=16,
        max_running=4,
    )
    scheduler = Scheduler(config)
    executor = FakeExecutor(num_pages=64, page_size=4, max_running=4, vocab_size=100)
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    arrivals: list[SchedulerMsg] = [
        UserMsg(uid=uid, ids=ids_to_bytes([uid] * 9), sampling=sampling) for uid in range(20)
    ]
    outbox = ListOutbox()
    start = time.perf_counter()
    # Turns without messages when all is done: the loop is idle in them.
    inbox = ListInbox([arrivals, *[[] for _ in range(300)]])
    run(scheduler, executor, inbox, outbox, overlap=overlap, meter=meter)
    return scheduler, time.perf_counter() - start


@pytest.mark.needs("minisgl_gateway")
@pytest.mark.parametrize("overlap", [True, False])
def test_the_meter_of_a_loop(overlap: bool, tmp_path: Path) -> None:
    from minisgl_gateway.watch.line_file import StepLog
    from minisgl_gateway.watch.steps import StepRecord

    reports: list[StatusReply] = []
    log = StepLog(tmp_path / "steps")
    meter = LoopMeter(rank=3, on_report=[reports.append])
    meter.watchers.append(log)
    scheduler, seconds = serve(meter, overlap=overlap)
    log.close()
    assert [report.rank for report in reports] == [3], "one when the work is done, none when idle"
    [last] = reports
    assert (last.num_running, last.num_waiting, last.num_used_pages) == (0, 0, 0)
    assert (last.num_prompt_tokens, last.num_cached_tokens) == (180, 0)
    assert (last.num_prefill_tokens, last.num_output_tokens) == (180, 100)
    assert last.num_steps == scheduler.stats.num_steps
    assert 0 < sum(last.part_s) <= seconds
    records = msgspec.json.decode(
        b"[%s]" % b",".join((tmp_path / "steps").read_bytes().splitlines()), type=list[StepRecord]
    )
    assert [record.step for record in records] == list(range(last.num_steps))
    assert sum(record.output_tokens for record in records) == 100
    assert sum(record.tokens - record.decodes for record in records) == 180
    assert max(record.rows for record in records) == 4
    assert records[-1].running == records[-1].waiting == 0
    assert 4 * 3 <= max(record.used_pages for record in records) <= 4 * 4  # 9 to 14 tokens each
    assert records[-1].used_pages == 0
    assert records[-1].cached_pages == last.num_cached_pages
    assert {record.num_pages for record in records} == {scheduler.config.num_pages}
    for part, total_s in zip(PARTS, last.part_s, strict=True):
        in_steps_s = sum(getattr(record, f"{part}_us") for record in records) / 1e6
        assert in_steps_s <= total_s + 1e-6 * len(records), part
        if part in ("launch", "wait", "commit"):  # the other parts are of turns without a step, too
            assert in_steps_s == pytest.approx(total_s, rel=1e-3, abs=1e-6 * len(records)), part


@pytest.mark.needs("minisgl_gateway")
def test_a_step_log_that_cannot_be_opened(tmp_path: Path) -> None:
    from minisgl_gateway.watch.line_file import StepLog

    with pytest.raises(ConfigError, match=r"--log-steps .*nowhere/steps: No such file"):
        StepLog(tmp_path / "nowhere" / "steps")


@pytest.mark.needs("minisgl_gateway")
@pytest.mark.parametrize("num_steps", [1, 1000])  # in the file's buffer, and beyond it
def test_a_full_disk_ends_only_the_step_log(
    num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    from minisgl_gateway.watch.line_file import StepLog
    from minisgl_gateway.watch.steps import StepRecord

    log, plan = StepLog(Path("/dev/full")), create_autospec(Plan, instance=True)
    for step in range(num_steps):
        log.stepped(StepRecord(**dict.fromkeys(StepRecord.__struct_fields__, step)), plan)
    log.reported(status(0))
    log.reported(status(0))
    log.close()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["--log-steps ends: /dev/full: No space left on device"]


def status(steps: int) -> StatusReply:
    return StatusReply(
        rank=0,
        num_waiting=1,
        num_running=2,
        num_pages=100,
        num_used_pages=25,
        num_cached_pages=5,
        num_steps=steps,
        num_retractions=steps // 10,
        num_prompt_tokens=100 * steps,
        num_cached_tokens=40 * steps,
        num_prefill_tokens=60 * steps,
        num_output_tokens=2 * steps,
        part_s=[0.01 * steps] * 6,
    )


@pytest.mark.needs("minisgl_gateway")
def test_the_status_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl_gateway.watch.status_line import StatusLine

    now = 100.0
    monkeypatch.setattr("minisgl_gateway.watch.status_line.time.monotonic", lambda: now)
    caplog.set_level("INFO", "minisgl")
    line = StatusLine()
    line.reported(status(0))  # nothing ran
    now += 10
    line.reported(status(100))
    now += 2
    line.reported(status(120))  # too early
    now += 4
    line.reported(status(150))
    now += 60
    line.reported(status(150))  # nothing since
    assert [record.getMessage() for record in caplog.records] == [
        "status running=2 waiting=1 prefill_tokens_per_s=1000 decode_tokens_per_s=33 kv_used=0.25 "
        f"hit_rate=0.4 retractions={gained} steps={steps} busy={busy}"
        for steps, gained, busy in ((100, 10, 0.6), (50, 5, 0.5))
    ]


def test_metrics_of_two_ranks() -> None:
    """Each rank reports its device. All have the same requests, so only rank 0 reports those."""
    observer = Observer()
    for rank, num_steps in ((1, 50), (0, 40)):  # one is ahead, so that the page shows which is used
        observer.status[rank] = msgspec.structs.replace(status(num_steps), rank=rank)
    page = MetricsPage(observer, 'a "quoted" name').render("").body.decode()
    assert json.dumps('a "quoted" name') in page
    values: dict[str, dict[str, list[float]]] = {}
    for family in text_string_to_metric_families(page):
        for name, labels, value, *_ in family.samples:
            if "rank" in labels:
                ranks = values.setdefault(name.removeprefix("minisgl_"), {})
                ranks.setdefault(labels["rank"], []).append(value)
    pages = [25, 5, 70]  # used, cached, free
    assert values == {
        "requests_running": {"0": [2]},
        "requests_waiting": {"0": [1]},
        "retractions_total": {"0": [4]},
        "prompt_tokens_total": {"0": [4000]},
        "cached_tokens_total": {"0": [1600]},
        "prefill_tokens_total": {"0": [2400]},
        "output_tokens_total": {"0": [80]},
        "drafted_total": {"0": [0]},
        "accepted_total": {"0": [0]},
        "steps_total": {"0": [40], "1": [50]},
        "step_seconds_total": {"0": [0.4] * len(PARTS), "1": [0.5] * len(PARTS)},
        "kv_pages": {"0": pages, "1": pages},
        "kv_usage": {"0": [0.25], "1": [0.25]},
        "peak_memory_bytes": {"0": [0], "1": [0]},
    }


@pytest.mark.needs("minisgl_gateway")
def test_metrics_of_drafters() -> None:
    """Rank 0 counts; a server that has not drafted has none."""
    observer = Observer()
    drafted, accepted = {"tree": 9, "ngram": 4}, {"tree": 7}
    for rank in (0, 1):
        observer.status[rank] = msgspec.structs.replace(
            status(9), rank=rank, drafted_by=drafted, accepted_by=accepted
        )
    page = MetricsPage(observer, "m").render("").body.decode()
    lines = [line for line in page.splitlines() if "_by_total{" in line]
    assert lines == [
        'minisgl_drafted_by_total{drafter="ngram",rank="0"} 4.0',
        'minisgl_drafted_by_total{drafter="tree",rank="0"} 9.0',
        'minisgl_accepted_by_total{drafter="tree",rank="0"} 7.0',
    ]


@pytest.mark.parametrize("version", ["latest", "1.x", ""])
def test_a_metrics_format_of_no_known_version(version: str) -> None:
    accept = f"application/openmetrics-text; version={version}"
    page = MetricsPage(Observer(), "m").render(accept)
    assert page.headers["content-type"].startswith(
        ("text/plain", "application/openmetrics-text; version=1.0.0")
    )
    assert b"minisgl_build_info" in page.body


@pytest.mark.needs("minisgl_gateway")
def test_metrics_of_equal_meaning_have_other_engines_names_too() -> None:
    from minisgl_gateway.watch.other_names import OTHER_NAMES

    """Each has our values, and stands in docs/observability.md."""
    observer = Observer()
    observer.time_to_first_token.observe(0.3)
    counts = {"num_waiting": 3, "num_running": 2, "num_pages": 8, "num_used_pages": 2}
    counts |= {"num_cached_pages": 1, "num_steps": 9, "num_retractions": 0}
    counts |= {"num_prompt_tokens": 40, "num_cached_tokens": 16, "num_prefill_tokens": 24}
    for rank in (0, 1):
        observer.status[rank] = StatusReply(
            rank=rank, num_output_tokens=7, part_s=[0.0] * len(PARTS), **counts
        )
    page = MetricsPage(observer, "m").render("").body.decode()
    families = {each.name: each for each in text_string_to_metric_families(page)}
    documented = (Path(__file__).parents[3] / "docs/observability.md").read_text()
    for theirs, ours in OTHER_NAMES.items():
        assert f"| `{theirs}` | `{ours}` |" in documented
        copy, own = (families[name.removesuffix("_total")] for name in (theirs, ours))
        assert copy.type == own.type
        values = [each.value for each in own.samples if each.labels.get("rank", "0") == "0"]
        assert [each.value for each in copy.samples] == values
        assert all(each.labels["model_name"] == "m" for each in copy.samples)
        assert all("rank" not in each.labels for each in copy.samples)
    assert 'vllm:num_requests_waiting{model_name="m"} 3.0' in page
    assert 'sglang:token_usage{model_name="m"} 0.25' in page
    assert 'vllm:prefix_cache_hits_total{model_name="m"} 16.0' in page
