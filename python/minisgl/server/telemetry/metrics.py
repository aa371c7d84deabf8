"""GET /metrics for Prometheus, POST /start_profile and /stop_profile.

The official client library writes the page from counters that others keep: the API process's own
(`minisgl.server.telemetry.observe`) and each rank's last report (`minisgl.scheduler.meter`), which
is at most a second old while there is work. docs/observability.md explains every metric.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from minisgl import __version__
from minisgl.errors import EngineError, MinisglError
from minisgl.message import ProfileReply
from minisgl.scheduler.meter import PARTS
from minisgl.server.api.models import ServedModel
from minisgl.server.api.schema import ErrorObject
from minisgl.server.errors import error_body
from minisgl.server.frontend import Frontend
from minisgl.server.telemetry.observe import Histogram, Observer

# To start takes 1.3 s on 2 cores, once; to stop, as long as writing a trace of many steps.
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 300.0

_RANK_COUNTERS: Final = {
    "steps": "Steps that were launched",
    "retractions": "Running requests whose KV pages were taken away for others",
    "prompt_tokens": "Prompt tokens of requests that started",
    "cached_tokens": "Of those, the tokens whose KV came from the prefix cache",
    "prefill_tokens": "Prompt tokens computed, again after a retraction",
    "output_tokens": "Output tokens given to requests",
}


class ProfileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """traces: the files on the server, rank by rank; trace: the first of them. requests:
    X-Request-Id by the uid in the steps' names."""

    trace: str
    traces: list[str]
    num_steps: int
    requests: dict[int, str]


class ProfileFailed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What /stop_profile says when some rank failed; the others' traces need `requests`, too."""

    error: ErrorObject
    requests: dict[int, str] = {}


def router(frontend: Frontend, model: ServedModel) -> APIRouter:
    routes = APIRouter()
    page = MetricsPage(frontend.observer, model.name)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Counters, gauges and histograms for Prometheus."""
        body, content_type = page.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    @routes.post("/start_profile")
    async def start_profile() -> Response:
        """Start a torch profile of the engine; 409 if one runs already."""
        replies = await frontend.round_trips.profile("start", START_TIMEOUT_S)
        if not all(reply.failed for reply in replies):
            frontend.observer.note_ids()
        if error := _failure(replies):
            raise error
        return Response(b'{"status":"profiling"}', media_type="application/json")

    @routes.post("/stop_profile")
    async def stop_profile() -> Response:
        """Write the traces into --profile-dir and say where; 409 if no profile runs."""
        replies = await frontend.round_trips.profile("stop", STOP_TIMEOUT_S)
        requests = frontend.observer.noted_ids()
        if error := _failure(replies):
            status, body = error_body(error)
            frontend.observer.answered(body.error.code)
            told = ProfileFailed(error=body.error, requests=requests)
            return Response(msgspec.json.encode(told), status, media_type="application/json")
        traces = [reply.trace or "" for reply in replies]
        answer = ProfileAnswer(
            trace=traces[0], traces=traces, num_steps=replies[0].num_steps, requests=requests
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return routes


def _failure(replies: list[ProfileReply]) -> MinisglError | None:
    """A conflict, if every rank says it alike; else what each says, if any failed."""
    failed = replies[0].failed
    if all(reply.failed == failed for reply in replies) and (not failed or failed.status < 500):
        return failed.to_error() if failed else None
    return EngineError("; ".join(map(_told, sorted(replies, key=lambda r: r.failed is None))))


def _told(reply: ProfileReply) -> str:
    if reply.failed:
        return f"rank {reply.rank} failed: {reply.failed.message}"
    if reply.trace:
        return f"rank {reply.rank} wrote {reply.trace}"
    return f"rank {reply.rank} is profiling; POST /stop_profile ends it"


class MetricsPage(Collector):
    """Frozen once built; what it reads changes."""

    def __init__(self, observer: Observer, model: str) -> None:
        self._observer = observer
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # of the API process

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page in a format that the Accept header allows, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # what the library makes of a version that is no number
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        observer = self._observer
        info = GaugeMetricFamily(
            "minisgl_build_info", "Always 1; the labels tell", labels=["version", "model"]
        )
        info.add_metric([__version__, self._model], 1)
        yield info
        start = GaugeMetricFamily(
            "minisgl_start_seconds", "Time of the server's start by part", labels=["part"]
        )
        for part, seconds in observer.start_s.items():
            start.add_metric([part], seconds)
        yield start
        yield from self._of_ranks()
        yield GaugeMetricFamily(
            "minisgl_requests_open", "Requests that the API server waits for", observer.num_open
        )
        yield _counts(
            "minisgl_requests", "Requests that ended, by how they did", "reason", observer.ends
        )
        yield _counts("minisgl_errors", "Errors told to clients", "code", observer.errors)
        for name, help_, histogram in (
            (
                "time_to_first_token",
                "From a request to its first text",
                observer.time_to_first_token,
            ),
            ("inter_token", "Between two pieces of a request's text", observer.inter_token),
            ("request", "From a request to its end", observer.request),
            ("queue", "From acceptance to the first launch", observer.queue),
        ):
            yield _histogram(f"minisgl_{name}_seconds", help_, histogram)

    def _of_ranks(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "minisgl_requests_running", "Requests that are computed", labels=["rank"]
        )
        waiting = GaugeMetricFamily(
            "minisgl_requests_waiting", "Requests in the queue", labels=["rank"]
        )
        pages = GaugeMetricFamily("minisgl_kv_pages", "KV pages by use", labels=["rank", "state"])
        part_s = CounterMetricFamily(
            "minisgl_step_seconds", "Time of the scheduler's loop by part", labels=["rank", "part"]
        )
        counters = {
            name: CounterMetricFamily(f"minisgl_{name}", help_, labels=["rank"])
            for name, help_ in _RANK_COUNTERS.items()
        }
        peak = GaugeMetricFamily(
            "minisgl_peak_memory_bytes",
            "Most memory of the rank's device in use at a time",
            labels=["rank"],
        )
        for rank, status in sorted(self._observer.status.items()):
            label = str(rank)
            if rank == 0:  # the others have the same requests
                running.add_metric([label], status.num_running)
                waiting.add_metric([label], status.num_waiting)
            peak.add_metric([label], status.peak_memory_bytes)
            used, cached = status.num_used_pages, status.num_cached_pages
            pages.add_metric([label, "used"], used)
            pages.add_metric([label, "cached"], cached)
            pages.add_metric([label, "free"], status.num_pages - used - cached)
            for part, seconds in zip(PARTS, status.part_s, strict=True):
                part_s.add_metric([label, part], seconds)
            for name, counter in counters.items():
                if rank == 0 or name == "steps":
                    counter.add_metric([label], getattr(status, f"num_{name}"))
        yield from (running, waiting, pages, peak, part_s, *counters.values())


def _counts(name: str, help_: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, help_, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _histogram(name: str, help_: str, histogram: Histogram) -> Metric:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, help_, buckets=buckets, sum_value=histogram.sum)
