"""Reads a server's model name and its Prometheus counters, before and after a run."""

from __future__ import annotations

import math
import re
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from minisgl.errors import ConfigError
from minisgl_gateway.http import http_client


def describe_server(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Return the served model's name. Raises ConfigError if no server answers."""
    try:
        response = _get(url, "/v1/models", api_key)
        response.raise_for_status()
        return {"model": response.json()["data"][0]["id"], "header": response.headers.get("server")}
    except ConfigError:
        raise
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise ConfigError(
            f"{url}/v1/models does not answer as an OpenAI-compatible server does "
            f"({type(error).__name__}: {error}); start one, or give its --url"
        ) from error


def scrape(url: str, api_key: str | None = None) -> dict[str, float]:
    """Return the samples of /metrics (Prometheus text format); {} if there is no such page."""
    try:
        response = _get(url, "/metrics", api_key)
    except httpx.HTTPError:
        return {}
    if response.status_code != 200:
        return {}
    try:
        return parse_metrics(response.text)
    except ValueError:
        return {}


def _get(url: str, path: str, api_key: str | None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with http_client(url, headers=headers, timeout=10) as client:
        return client.get(path)


def parse_metrics(text: str) -> dict[str, float]:
    """Return the finite samples of a page in Prometheus' text format, by name and labels.

    Raises ValueError if the page is of another format.
    """
    return {
        _key(sample): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if math.isfinite(sample.value)
    }


def _key(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}}" if labels else sample.name


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return what each counter gained; without the buckets of histograms."""
    return {
        name: round(value - before.get(name, 0.0), 6)
        for name, value in after.items()
        if re.search(r"(_total|_sum|_count)(\{|$)", name) and value != before.get(name, 0.0)
    }
