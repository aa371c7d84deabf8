"""Writes pages in Prometheus's formats."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric


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
