"""`cpu_formats`: its arithmetic, and a run with a tiny shape.

A planted bug that it found: a decode rate with the first token's time in it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from minisgl_bench.shapes import SHAPES
from minisgl_bench.studies import cpu_formats


def test_rates_are_of_the_least_seconds_and_of_tokens_after_the_first() -> None:
    args = argparse.Namespace(prompt=100, batch=[4], output=10)
    seconds = {"prefill 100": [2.0, 0.5], "first 4": [1.0, 3.0], "all 4": [5.0, 2.0]}
    assert cpu_formats._rates(seconds, args) == {"prefill 100": 200.0, "decode 4": 40.0}


def test_the_floor_is_reading_or_multiplying() -> None:
    floor = cpu_formats.Floor(SHAPES["tiny"], prompt=32)
    num_weights = floor._weights
    read_s = floor._table.nbytes / (2 * num_weights)  # the weights in a second
    gemms_s = 32 * floor._layer / (num_weights * 4)  # four rows of all weights in a second
    rates = floor.rates({"read": [read_s, 1e9], "gemms": [gemms_s, 1e9]}, [1, 16], 32)
    assert rates["decode 1"] == pytest.approx(1)
    assert rates["decode 16"] == pytest.approx(4)
    assert rates["prefill 32"] == pytest.approx(32 / (2 * gemms_s))


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    flags = "--shape tiny --batch 2 --prompt 16 --output 2 --rounds 1 --json"
    cpu_formats.main([*flags.split(), str(path)])
    result = json.loads(path.read_text())
    assert set(result["rates"]) == {"floor", "bf16", "int8", "int4"}
    assert set(result["ratios"]) == {"bf16 / floor", "int8 / bf16", "int4 / bf16"}
    assert set(result["ratios"]["int8 / bf16"]) == {"prefill 16", "decode 2"}
    assert "int4 / bf16: " in capsys.readouterr().out
