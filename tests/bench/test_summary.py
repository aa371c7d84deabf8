from __future__ import annotations

import numpy as np
import pytest

from minisgl.benchmark.record import Record
from minisgl.errors import ConfigError
from minisgl_bench.summary import (
    Slo,
    distribution,
    request_values,
    summarize,
    token_gaps,
    token_times,
)


def record(arrivals: list[float], counts: list[int], **fields: object) -> Record:
    chunks = list(zip(arrivals, counts, strict=True))
    ended = fields.pop("ended", arrivals[-1] if arrivals else 0.0)
    return Record(session=0, turn=0, due=None, chunks=chunks, ended=ended, **fields)


def test_chunks_with_ids_count_every_token_at_its_arrival() -> None:
    times, how = token_times(record([1.0, 1.5, 2.0], [1, 3, 1]))
    assert (times, how) == ([1.0, 1.5, 1.5, 1.5, 2.0], "ids")


def test_without_ids_the_usage_says_how_many_tokens_came_together() -> None:
    times, how = token_times(record([1.0, 1.5, 2.0], [0, 0, 0], num_output=5))
    assert how == "usage"
    assert len(times) == 5
    # The gaps that were seen are all there, and the tokens that came along have none.
    assert sorted(np.diff(times)) == [0.0, 0.0, 0.5, 0.5]


def test_an_end_without_text_is_a_token_only_if_the_usage_says_so() -> None:
    silent = record([1.0, 1.5], [0, 0], num_output=3, finish_at=2.5)
    assert token_times(silent)[0] == [1.0, 1.5, 2.5]
    empty = record([1.0, 1.5], [0, 0], num_output=2, finish_at=2.5)
    assert token_times(empty)[0] == [1.0, 1.5]
    nothing_to_show = record([], [], num_output=1, finish_at=2.5)
    assert token_times(nothing_to_show)[0] == [2.5]


def test_without_usage_chunks_are_counted_and_a_note_says_so() -> None:
    assert token_times(record([1.0, 1.5], [0, 0])) == ([1.0, 1.5], "chunks")


def test_tokens_that_arrive_together_share_the_gap() -> None:
    """Confirmed drafts: the median is no 0, and the largest ITL is the stall itself."""
    burst = record([1.0, 1.4, 1.8, 1.8, 2.0], [2, 4, 1, 3, 1], sent=0.9)
    assert token_gaps(burst) == pytest.approx([0.1] * 8 + [0.2])
    summary = summarize([burst], Slo())["summary"]
    assert summary["itl_ms"]["p50"] == pytest.approx(100)
    assert summary["largest_itl_ms"]["max"] == pytest.approx(400)
    by_usage = record([1.0, 1.4, 1.8], [0, 0, 0], num_output=9)
    assert token_gaps(by_usage) == pytest.approx([0.1, 0.1])
    assert token_gaps(record([1.0, 1.4, 1.8], [0, 0, 0])) == pytest.approx([0.4, 0.4])
    assert len(token_gaps(record([1.0], [5]))) == 0


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1001])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    found = distribution(values)
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(values, share), abs=1e-4)
    assert found["mean"] == pytest.approx(values.mean(), abs=1e-4)
    assert found["max"] == pytest.approx(values.max(), abs=1e-4)


def test_a_request_with_one_token_has_no_tpot_to_report() -> None:
    result = summarize([record([1.0], [1]), record([1.0, 1.2], [1, 1])], Slo())
    assert result["summary"]["tpot_ms"]["mean"] == pytest.approx(200)
    assert result["summary"]["num_output_tokens"] == 3


def test_a_hand_written_run() -> None:
    done = [
        record([0.1, 0.2, 0.5], [1, 1, 1], sent=0.0, num_prompt=8, num_cached=4, ended=0.6),
        record([1.3, 1.4], [1, 1], sent=1.0, num_prompt=8, num_cached=0, ended=2.0),
    ]
    failed = Record(session=2, turn=0, due=None, sent=1.0, ended=1.1, error="HTTP 500: no")
    result = summarize([*done, failed], Slo(ttft_ms=150))
    summary = result["summary"]
    assert summary["duration_s"] == 2.0
    assert summary["num_failed"] == 1
    assert summary["requests_per_s"] == 1.0
    assert summary["output_tokens_per_s"] == 2.5
    assert summary["total_tokens_per_s"] == 10.5
    assert summary["cached_share"] == 0.25
    assert summary["goodput_per_s"] == 0.5  # one of two is within the SLO, in two seconds
    assert summary["goodput_share"] == pytest.approx(1 / 3, abs=1e-4)  # a failure is no goodput
    assert summary["ttft_ms"]["max"] == pytest.approx(300)
    assert summary["largest_itl_ms"]["max"] == pytest.approx(300)
    assert summary["itl_ms"]["p50"] == pytest.approx(100)
    assert result["errors"] == {"HTTP 500: no": 1}


def test_slo() -> None:
    values = request_values([0.1, 0.15, 0.3], record([0.1, 0.15, 0.3], [1, 1, 1], ended=0.35))
    assert values == pytest.approx({"ttft_ms": 100, "tpot_ms": 100, "itl_ms": 150, "e2e_ms": 350})
    assert Slo.parse("ttft=100.1,tpot=101").met(values)
    assert not Slo.parse("itl=140").met(values)
    assert not Slo.parse("e2e=349").met(values)
    for wrong in ("ttft", "ttft=fast", "latency=3", ""):
        with pytest.raises(ConfigError, match="reads like ttft=500"):
            Slo.parse(wrong)
