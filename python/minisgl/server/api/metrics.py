"""GET /metrics: a page for Prometheus.

Its values are the API process's counters (`minisgl.server.observe`) and each rank's last
report (`minisgl.scheduler.meter`), which is at most a second old while there is work.
docs/observability.md explains every metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

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

from minisgl import plugins
from minisgl.scheduler.loop import PARTS
from minisgl.server.clients import Keys
from minisgl.server.observe import Histogram, Observer
from minisgl.server.site import Routes, Site
from minisgl.version import __version__


def metrics_page(registry: CollectorRegistry, accept: str) -> Response:
    """Return the metrics of `registry` in a format that the Accept header allows."""
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # the header names a version that is no number
        encode, content_type = choose_encoder("")
    return Response(encode(registry), headers={"Content-Type": content_type})


def counter_by(name: str, help_: str, label: str, counts: Mapping[str, int]) -> Metric:
    """Return a counter with one sample for each value of `label`."""
    family = CounterMetricFamily(name, help_, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


_RANK_COUNTERS: Final = {
    "steps": "Steps that were launched",
    "retractions": "Running requests that lost their KV pages to others",
    "prompt_tokens": "Prompt tokens of requests that started",
    "cached_tokens": "Of those, the tokens whose KV came from the prefix cache",
    "prefill_tokens": "Prompt tokens computed, again after a retraction",
    "output_tokens": "Output tokens given to requests",
}


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    page = MetricsPage(site.frontend.observer, site.model.name, site.keys)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Counters, gauges and histograms for Prometheus."""
        return page.render(request.headers.get("accept", ""))

    return routes


MoreMetrics = Callable[[Iterable[Metric], str], Iterator[Metric]]
"""A row of the table `metrics`: from the server's metrics and the model's name to more metrics."""


class MetricsPage(Collector):
    """The metrics of a server, as Prometheus's client library collects them."""

    def __init__(self, observer: Observer, model: str, keys: Keys | None = None) -> None:
        self._observer = observer
        self._keys = keys
        self._more: list[MoreMetrics] = [row.load() for row in plugins.rows("metrics")]
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # of the API process

    def render(self, accept: str) -> Response:
        """Return the page in a format that the Accept header allows."""
        return metrics_page(self._registry, accept)

    def collect(self) -> Iterator[Metric]:
        ours = [*self._ours()]
        yield from ours
        for more in self._more:
            yield from more(ours, self._model)

    def _ours(self) -> Iterator[Metric]:
        observer = self._observer
        info = GaugeMetricFamily(
            "minisgl_build_info",
            "Always 1; its labels are the version and the model",
            labels=["version", "model"],
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
        yield GaugeMetricFamily(
            "minisgl_oldest_token_age_seconds",
            "The longest time of an open request since its last text",
            observer.oldest_token_age_s,
        )
        yield counter_by(
            "minisgl_requests", "Requests that ended, by reason", "reason", observer.ends
        )
        yield CounterMetricFamily(
            "minisgl_restarts", "Starts of the engine after a failure", observer.num_restarts
        )
        if observer.cost:
            device_s, joules = observer.cost
            yield CounterMetricFamily(
                "minisgl_device_seconds", "Device time of the requests that ended", device_s
            )
            yield CounterMetricFamily(
                "minisgl_energy_joules", "Energy of the requests that ended", joules
            )
        yield counter_by("minisgl_errors", "Errors that clients got", "code", observer.errors)
        if self._keys:
            yield from _of_keys(self._keys)
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
            "minisgl_requests_running", "Requests that are running", labels=["rank"]
        )
        waiting = GaugeMetricFamily(
            "minisgl_requests_waiting", "Requests in the queue", labels=["rank"]
        )
        pages = GaugeMetricFamily("minisgl_kv_pages", "KV pages by use", labels=["rank", "state"])
        usage = GaugeMetricFamily(
            "minisgl_kv_usage", "Share of KV pages in use by running requests", labels=["rank"]
        )
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
            if rank == 0:  # the other ranks have the same requests
                running.add_metric([label], status.num_running)
                waiting.add_metric([label], status.num_waiting)
            peak.add_metric([label], status.peak_memory_bytes)
            used, cached = status.num_used_pages, status.num_cached_pages
            pages.add_metric([label, "used"], used)
            usage.add_metric([label], used / status.num_pages)
            pages.add_metric([label, "cached"], cached)
            pages.add_metric([label, "free"], status.num_pages - used - cached)
            for part, seconds in zip(PARTS, status.part_s, strict=True):
                part_s.add_metric([label, part], seconds)
            for name, counter in counters.items():
                if rank == 0 or name == "steps":
                    counter.add_metric([label], getattr(status, f"num_{name}"))
        yield from (running, waiting, pages, usage, peak, part_s, *counters.values())


def _of_keys(keys: Keys) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "minisgl_key_requests", "Requests of an API key", labels=["key", "result"]
    )
    tokens = CounterMetricFamily(
        "minisgl_key_tokens", "Tokens of an API key's requests", labels=["key", "kind"]
    )
    for key in keys:
        requests.add_metric([key.name, "admitted"], key.num_requests)
        requests.add_metric([key.name, "refused"], key.num_refused)
        tokens.add_metric([key.name, "prompt"], key.num_prompt_tokens)
        tokens.add_metric([key.name, "output"], key.num_output_tokens)
    yield from (requests, tokens)


def _histogram(name: str, help_: str, histogram: Histogram) -> Metric:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, help_, buckets=buckets, sum_value=histogram.sum)


ROUTES: Final = Routes(router)
