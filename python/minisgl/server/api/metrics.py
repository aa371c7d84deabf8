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
    "drafted": "Drafts: guessed tokens that steps have computed",
    "accepted": "Of those, the tokens that were right, and so are output tokens",
}


_HISTOGRAMS: Final = {
    "time_to_first_token": "From a request to its first text",
    "inter_token": "Between two pieces of a request's text",
    "request": "From a request to its end",
    "queue": "From acceptance to the first launch",
}
"""Histograms of `Observer`, by name."""


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    page = MetricsPage(site.frontend.observer, site.model.name, site.keys)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Counters, gauges and histograms for Prometheus."""
        return page.render(request.headers.get("accept", ""))

    return routes


MoreMetrics = Callable[[Iterable[Metric], "MetricsPage"], Iterator[Metric]]
"""A row of the table `metrics`: from these metrics and their page to more metrics."""


class MetricsPage(Collector):
    """The metrics of a server, as Prometheus's client library collects them."""

    def __init__(self, observer: Observer, model: str, keys: Keys | None = None) -> None:
        self.observer, self.model, self.keys = observer, model, keys
        self._more: list[MoreMetrics] = [row.load() for row in plugins.rows("metrics")]
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
            yield from more(ours, self)

    def _ours(self) -> Iterator[Metric]:
        observer = self.observer
        info = GaugeMetricFamily(
            "minisgl_build_info",
            "Always 1; its labels are the version and the model",
            labels=["version", "model"],
        )
        info.add_metric([__version__, self.model], 1)
        yield info
        yield from self._of_ranks()
        yield GaugeMetricFamily(
            "minisgl_requests_open", "Requests that the API server waits for", observer.num_open
        )
        yield counter_by(
            "minisgl_requests", "Requests that ended, by reason", "reason", observer.ends
        )
        yield counter_by("minisgl_errors", "Errors that clients got", "code", observer.errors)
        for name, help_ in _HISTOGRAMS.items():
            yield _histogram(f"minisgl_{name}_seconds", help_, getattr(observer, name))

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
        counters = {
            name: CounterMetricFamily(f"minisgl_{name}", help_, labels=["rank"])
            for name, help_ in _RANK_COUNTERS.items()
        }
        for rank, status in sorted(self.observer.status.items()):
            label = str(rank)
            if rank == 0:  # the other ranks have the same requests
                running.add_metric([label], status.num_running)
                waiting.add_metric([label], status.num_waiting)
            used, cached = status.num_used_pages, status.num_cached_pages
            pages.add_metric([label, "used"], used)
            usage.add_metric([label], used / status.num_pages)
            pages.add_metric([label, "cached"], cached)
            pages.add_metric([label, "free"], status.num_pages - used - cached)
            for name, counter in counters.items():
                if rank == 0 or name == "steps":
                    counter.add_metric([label], getattr(status, f"num_{name}"))
        yield from (running, waiting, pages, usage, *counters.values())


def _histogram(name: str, help_: str, histogram: Histogram) -> Metric:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, help_, buckets=buckets, sum_value=histogram.sum)


ROUTES: Final = Routes(router)
