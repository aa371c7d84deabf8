"""The metrics of the server's start and restarts, of each rank's steps, of drafters, of energy and
of keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from minisgl.message import StatusReply
from minisgl.scheduler.loop import PARTS
from minisgl.server.api.metrics import MetricsPage, counter_by
from minisgl.server.clients import Keys


def of_server(ours: Iterable[Metric], page: MetricsPage) -> Iterator[Metric]:
    """Yield the metrics. ours: the core's, which are not used."""
    observer = page.observer
    start = GaugeMetricFamily(
        "minisgl_start_seconds", "Time of the server's start by part", labels=["part"]
    )
    for part, seconds in observer.start_s.items():
        start.add_metric([part], seconds)
    yield start
    peak = GaugeMetricFamily(
        "minisgl_peak_memory_bytes",
        "Most memory of the rank's device in use at a time",
        labels=["rank"],
    )
    part_s = CounterMetricFamily(
        "minisgl_step_seconds", "Time of the scheduler's loop by part", labels=["rank", "part"]
    )
    for rank, status in sorted(observer.status.items()):
        label = str(rank)
        peak.add_metric([label], status.peak_memory_bytes)
        for part, seconds in zip(PARTS, status.part_s, strict=True):
            part_s.add_metric([label, part], seconds)
    yield from (peak, part_s)
    yield from _of_drafters(observer.status)
    yield GaugeMetricFamily(
        "minisgl_oldest_token_age_seconds",
        "The longest time of an open request since its last text",
        observer.oldest_token_age_s,
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
    if observer.images:
        shown, computed, seconds = observer.images
        yield counter_by(
            "minisgl_images",
            "Images of the requests that ended, by whether the vision tower ran for them",
            "result",
            {"computed": computed, "cached": shown - computed},
        )
        yield CounterMetricFamily(
            "minisgl_image_seconds", "Time of the vision tower for these requests", seconds
        )
    if page.keys:
        yield from _of_keys(page.keys)


def _of_drafters(statuses: Mapping[int, StatusReply]) -> Iterator[Metric]:
    """Yield the counters of drafts; none without drafters. The other ranks have the same drafts."""
    if 0 not in statuses:
        return
    counted = {
        "drafted": ("Drafts that steps have computed, by drafter", statuses[0].drafted_by),
        "accepted": ("Of those, the tokens that were right, by drafter", statuses[0].accepted_by),
    }
    for name, (help_, counts) in counted.items():
        family = CounterMetricFamily(f"minisgl_{name}_by", help_, labels=["rank", "drafter"])
        for drafter, count in sorted(counts.items()):
            family.add_metric(["0", drafter], count)
        if counts:
            yield family


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
