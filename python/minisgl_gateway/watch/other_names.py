"""Our metrics under the names that dashboards of vLLM and SGLang ask for.

Sources of the names: vLLM's page "Metrics", SGLang's page "Production Metrics". Only those whose
meaning is equal are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from minisgl.server.api.metrics import MetricsPage

OTHER_NAMES: Final = {
    "vllm:num_requests_running": "minisgl_requests_running",
    "vllm:num_requests_waiting": "minisgl_requests_waiting",
    "vllm:kv_cache_usage_perc": "minisgl_kv_usage",
    "vllm:prompt_tokens_total": "minisgl_prompt_tokens_total",
    "vllm:generation_tokens_total": "minisgl_output_tokens_total",
    "vllm:prefix_cache_queries_total": "minisgl_prompt_tokens_total",
    "vllm:prefix_cache_hits_total": "minisgl_cached_tokens_total",
    "vllm:time_to_first_token_seconds": "minisgl_time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds": "minisgl_request_seconds",
    "sglang:num_running_reqs": "minisgl_requests_running",
    "sglang:num_queue_reqs": "minisgl_requests_waiting",
    "sglang:token_usage": "minisgl_kv_usage",
    "sglang:time_to_first_token_seconds": "minisgl_time_to_first_token_seconds",
    "sglang:e2e_request_latency_seconds": "minisgl_request_seconds",
}
"""Ours, by theirs."""


def under_other_names(ours: Iterable[Metric], page: MetricsPage) -> Iterator[Metric]:
    """Yield the metrics of `OTHER_NAMES`: rank 0's, with the label `model_name`."""
    by_name = {metric.name: metric for metric in ours}
    for theirs, name in OTHER_NAMES.items():
        metric, theirs = by_name[name.removesuffix("_total")], theirs.removesuffix("_total")
        copy = Metric(theirs, f"The same as {name}", metric.type)
        for sample in metric.samples:
            if sample.labels.get("rank", "0") == "0":
                labels = {key: value for key, value in sample.labels.items() if key != "rank"}
                end = sample.name.removeprefix(metric.name)
                copy.add_sample(theirs + end, labels | {"model_name": page.model}, sample.value)
        yield copy
