"""GET /metrics of a router: its own metrics, and those of the replicas with the label `replica`.

Prometheus can add up the replicas: `sum without (replica) (minisgl_output_tokens_total)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

from minisgl.server.api.metrics import counter_by, metrics_page
from minisgl_gateway.router.fleet import Fleet, NoReplica, Replica
from minisgl_gateway.router.upstream import Headers, ReplicaFailed, with_key

PAGE_S: Final = 5.0
"""A page that does not come in this time is left out: Prometheus waits 10 s for all of them."""


class RouterMetrics:
    """The router's counters. Mutable. num_retries: requests that went to a second replica."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.num_retries = 0
        self._probes = {"true": 0, "false": 0}
        self._errors: dict[str, int] = {}
        self._probe_s = 0.0

    def probed(self, seconds: float, *, found: bool) -> None:
        """Count a request for a prompt's hashes. found: whether the hashes came."""
        self._probes[str(found).lower()] += 1
        self._probe_s += seconds

    def refused(self, code: str) -> None:
        """Count an error with which the router itself answers."""
        self._errors[code] = self._errors.get(code, 0) + 1

    async def page(self, headers: Headers) -> Response:
        """Return the page. headers: of the request; the replicas check the client's key.

        Raises NoReplica if there is a key to check, and no replica does.
        """
        accept = b",".join(value for name, value in headers if name == b"accept").decode("latin-1")
        up = self._fleet.up
        pages = await asyncio.gather(*(_page(replica, with_key(headers)) for replica in up))
        for status, body in pages:
            if status in (401, 403):
                return Response(body, status, media_type="application/json")
        texts = {
            replica.name: body.decode()
            for replica, (status, body) in zip(up, pages, strict=True)
            if status == 200
        }
        if self._fleet.needs_key and not texts:
            raise NoReplica("no replica can check the API key; try again later")
        registry = CollectorRegistry()
        registry.register(_Page([*self._own(), *with_replica(texts)]))
        return metrics_page(registry, accept)

    def _own(self) -> Iterator[Metric]:
        is_up = GaugeMetricFamily(
            "minisgl_replica_up", "Whether the replica gets requests", labels=["replica"]
        )
        open_ = GaugeMetricFamily(
            "minisgl_replica_requests_open", "Requests at the replica", labels=["replica"]
        )
        ends = CounterMetricFamily(
            "minisgl_router_requests", "Requests passed on, by end", labels=["replica", "result"]
        )
        for replica in self._fleet.replicas:
            is_up.add_metric([replica.name], float(replica.down is None))
            open_.add_metric([replica.name], replica.num_open)
            for result, count in sorted(replica.ends.items()):
                ends.add_metric([replica.name, result], count)
        yield from (is_up, open_, ends)
        yield counter_by(
            "minisgl_router_prompts", "Prompts whose hashes were asked for", "found", self._probes
        )
        yield counter_by("minisgl_router_errors", "The router's own errors", "code", self._errors)
        yield CounterMetricFamily("minisgl_router_prompt_seconds", "Time for that", self._probe_s)
        yield CounterMetricFamily(
            "minisgl_router_retries", "Requests that went to another replica", self.num_retries
        )


class _Page(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def with_replica(texts: dict[str, str]) -> list[Metric]:
    """Return all metrics of several pages. texts: the pages in Prometheus's text format, by the
    replica's name, which becomes a label."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for metric in text_string_to_metric_families(text):
            family = families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type)
            )
            for sample in metric.samples:
                labels = {**sample.labels, "replica": name}
                family.samples.append(sample._replace(labels=labels))
    return list(families.values())


async def _page(replica: Replica, headers: Headers) -> tuple[int, bytes]:
    """Return a replica's status and page; status 0 if it does not answer."""
    try:
        async with asyncio.timeout(PAGE_S):
            return await replica.upstream.get("/metrics", headers)
    except (ReplicaFailed, TimeoutError):
        return 0, b""
