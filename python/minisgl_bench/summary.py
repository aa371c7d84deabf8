"""Summarises the client's records: latency distributions, throughput, goodput.

Definitions. TTFT: the time from sending a request to its first token. ITL: a token's time since the
token before it; tokens that arrive together share the gap, or else a server that confirms drafts
would have a median of 0. The largest ITL of a request is the longest gap itself, so no stall is
averaged away. TPOT: a request's (end - first token) / (tokens - 1). E2E: the time from sending to
the end of the stream. Goodput: requests a second that met every part of the SLO (as in DistServe,
Zhong et al., OSDI 2024).
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.benchmark.record import Record
from minisgl.errors import ConfigError
from minisgl_bench.arguments import above_zero

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Bounds in milliseconds; None is no bound. `itl_ms` bounds a request's largest ITL."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse a text such as ttft=500,tpot=50. Raises ConfigError."""
        bounds = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                if name not in ("ttft", "tpot", "itl", "e2e"):
                    raise ValueError(name)
                bounds[f"{name}_ms"] = above_zero(value)
            except (ValueError, ArgumentTypeError):
                raise ConfigError(
                    f"an SLO reads like ttft=500,tpot=50 (ms; also itl, e2e), got {part!r}"
                ) from None
        return cls(**bounds)

    def met(self, values: dict[str, float]) -> bool:
        for name in self.__dataclass_fields__:
            bound = getattr(self, name)
            if bound is not None and values[name] > bound:
                return False
        return True


def distribution(values: Sequence[float] | Floats) -> dict[str, float]:
    """Return mean, p50, p90, p99 and max, with linear interpolation; {} for no values."""
    if not len(values):
        return {}
    array = np.asarray(values, np.float64)
    p50, p90, p99 = np.percentile(array, [50, 90, 99])
    named = {"mean": array.mean(), "p50": p50, "p90": p90, "p99": p99, "max": array.max()}
    return {name: round(float(value), 4) for name, value in named.items()}


def token_times(record: Record) -> tuple[list[float], str]:
    """Return the arrival of each output token, and how the tokens were counted.

    "ids": the chunks name their tokens. "usage": only the total is known. Each chunk counts as
    one token, and an end without text as one if the total is larger; the others arrived with
    one of these. "chunks": the total is unknown, and each chunk counts as one.
    """
    if any(count for _, count in record.chunks):
        return [at for at, count in record.chunks for _ in range(count)], "ids"
    times = [at for at, _ in record.chunks]
    if record.num_output is None:
        return times, "chunks"
    if record.num_output > len(times) and record.finish_at is not None:
        times.append(record.finish_at)
    # Their chunk is unknown, but their ITL is 0 in any chunk.
    missing = max(record.num_output - len(times), 0)
    return times[:1] + times[:1] * missing + times[1:], "usage"


def token_gaps(record: Record) -> Floats:
    """Return the ITL in seconds of each token that did not arrive first: the time since the arrival
    before, over the tokens that came with it. If chunks do not name their tokens, each arrival has
    the mean number, and one value."""
    times, how = token_times(record)
    arrivals, counts = np.unique(times, return_counts=True)
    gaps: Floats = np.diff(arrivals)
    if how == "ids":
        return np.repeat(gaps / counts[1:], counts[1:])
    num_tokens = max(record.num_output or 0, len(times))
    return gaps / max((num_tokens - 1) / len(gaps), 1.0) if len(gaps) else gaps


def request_values(times: Sequence[float], record: Record) -> dict[str, float]:
    """Return a finished request's TTFT, TPOT, largest ITL and E2E, in milliseconds."""
    gaps = np.diff(times)
    return {
        "ttft_ms": (times[0] - record.sent) * 1e3,
        "tpot_ms": (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else 0.0,
        "itl_ms": float(gaps.max()) * 1e3 if len(gaps) else 0.0,
        "e2e_ms": (record.ended - record.sent) * 1e3,
    }


def summarize(records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    """Return a run's `summary` and `requests` (columns)."""
    done: list[Record] = []
    errors = Counter(record.error for record in records if record.error is not None)
    per_request: list[dict[str, float]] = []
    itl: list[Floats] = []
    several: list[float] = []  # the TPOT of requests with more than one token
    counted: dict[str, int] = {}
    num_output = 0
    for record in records:
        times, how = token_times(record)
        if record.error is None and not times:
            errors["no output"] += 1
        if record.error is not None or not times:
            continue
        done.append(record)
        counted[how] = counted.get(how, 0) + 1
        num_output += len(times)
        per_request.append(request_values(times, record))
        itl.append(token_gaps(record) * 1e3)
        if len(times) > 1:
            several.append(per_request[-1]["tpot_ms"])
    columns = {
        name: [values[name] for values in per_request]
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    }
    rounded = {name: [round(value, 3) for value in values] for name, values in columns.items()}
    all_itl = np.concatenate(itl) if itl else np.empty(0)
    gaps = [np.diff([at for at, _ in record.chunks]) * 1e3 for record in done]
    start = min((record.sent for record in records), default=0.0)
    duration = max((record.ended for record in records), default=0.0) - start
    met = [slo.met(values) for values in per_request]
    num_prompt = sum(record.num_prompt or 0 for record in done)
    num_cached = sum(record.num_cached or 0 for record in done)
    late = [(record.sent - record.due) * 1e3 for record in records if record.due is not None]
    beyond = [
        (values["ttft_ms"] - record.server_ttft_s * 1e3)
        for values, record in zip(per_request, done, strict=True)
        if record.server_ttft_s is not None
    ]
    summary: dict[str, Any] = {
        "num_requests": len(records),
        "num_failed": len(records) - len(done),
        "duration_s": round(duration, 3),
        "requests_per_s": _rate(len(done), duration),
        "output_tokens_per_s": _rate(num_output, duration),
        "total_tokens_per_s": _rate(num_output + num_prompt, duration),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "cached_share": round(num_cached / num_prompt, 4) if num_prompt else None,
        "goodput_per_s": _rate(sum(met), duration),
        "goodput_share": round(sum(met) / len(records), 4) if records else 0.0,
        "ttft_ms": distribution(columns["ttft_ms"]),
        "ttft_beyond_server_ms": distribution(beyond),
        "itl_ms": distribution(all_itl),
        "largest_itl_ms": distribution(columns["itl_ms"]),
        "chunk_gap_ms": distribution(np.concatenate(gaps) if gaps else []),
        "tpot_ms": distribution(several),
        "e2e_ms": distribution(columns["e2e_ms"]),
        "late_ms": distribution(late),
    }
    sent = [round(record.sent - start, 4) for record in done]
    cached = [record.num_cached for record in done]
    return {
        "summary": summary,
        "tokens_counted_by": counted,
        "errors": dict(errors),
        "requests": {"sent_s": sent, "num_cached": cached, **rounded},
    }


def _rate(count: int, duration_s: float) -> float:
    return round(count / duration_s, 3) if duration_s > 0 else 0.0
