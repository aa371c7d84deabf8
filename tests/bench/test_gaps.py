"""Gaps between a stream's tokens, by a recording."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minisgl.errors import ConfigError
from minisgl_bench.studies.gaps import Gap, summary

PLAIN = Gap(
    step=1, seconds=2e-3, predicted_s=2e-3, decodes=10, context=5000, prompt_tokens=0, launch_us=100
)


def test_a_gap_is_compared_with_the_bound_and_a_decode_step() -> None:
    late = replace(PLAIN, step=7, seconds=15e-3, predicted_s=12e-3, prompt_tokens=4000, decodes=20)
    found = summary([PLAIN] * 8 + [late], bound_s=10e-3)
    assert found["gaps"] == 100
    assert found["share_0_ms_above"] == found["share_2_ms_above"] == 0.2  # 3 ms above
    assert found["longest_ms"] == 15.0
    assert found["actual_over_predicted_max"] == 1.25
    assert (found["rows"][0]["step"], found["rows"][0]["over_ms"]) == (7, 3.0)
    assert summary([PLAIN] * 8 + [late], bound_s=14e-3)["share_0_ms_above"] == 0


def test_a_decode_step_is_as_long_as_those_of_similar_contexts() -> None:
    short = [replace(PLAIN, seconds=1e-3, context=100)] * 40
    long = [replace(PLAIN, seconds=6e-3, context=90_000)] * 40
    step = replace(PLAIN, seconds=15e-3, prompt_tokens=500, context=80_000)
    assert summary([*short, *long, step], bound_s=10e-3)["share_0_ms_above"] == 0


def test_without_decode_steps_there_is_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="no two successive steps decode"):
        summary([replace(PLAIN, prompt_tokens=5)], bound_s=1.0)
