"""What a server says of itself: the model's name, and its Prometheus counters before and after."""

from __future__ import annotations

import re
from typing import Any

import httpx

from minisgl.errors import ConfigError


def describe_server(url: str, api_key: str | None = None) -> dict[str, Any]:
    """The served model's name. Raises ConfigError when nobody answers."""
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        response = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=10)
        response.raise_for_status()
        return {"model": response.json()["data"][0]["id"], "header": response.headers.get("server")}
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{url}/v1/models does not answer as an OpenAI-compatible server does "
            f"({type(error).__name__}: {error}); start one, or say --url"
        ) from error


def scrape(url: str) -> dict[str, float]:
    """The samples of /metrics (Prometheus text format); none where there is no such page."""
    try:
        response = httpx.get(f"{url.rstrip('/')}/metrics", timeout=10)
    except httpx.HTTPError:
        return {}
    if response.status_code != 200:
        return {}
    return parse_metrics(response.text)


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of the Prometheus text format by name and labels."""
    samples = re.findall(r"(?m)^([a-zA-Z_:][\w:]*(?:\{.*\})?) ([-+0-9.eE]+)", text)
    return {name: float(value) for name, value in samples}


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the counters gained in between; buckets of histograms are left out."""
    return {
        name: round(value - before.get(name, 0.0), 6)
        for name, value in after.items()
        if re.search(r"(_total|_sum|_count)(\{|$)", name) and value != before.get(name, 0.0)
    }
