"""What a CPU chooses by itself: how long idle threads spin, and a dtype instead of float16."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from minisgl.engine import EngineConfig, connect
from minisgl.engine.connect import resolve_dtype
from minisgl.models import ModelConfig
from minisgl.quantization import UNQUANTISED

SPIN, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({SPIN: "7"}, "7"), ({POLICY: "active"}, "None")]
)
def test_idle_threads_spin_shortly_unless_the_user_says_otherwise(
    given: dict[str, str], expected: str
) -> None:
    env = {name: value for name, value in os.environ.items() if name not in (SPIN, POLICY)}
    code = f"import minisgl, os; print(os.environ.get('{SPIN}'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("asked", "is_slow", "expected"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float16),
        ("float16", True, torch.float16),
    ],
)
def test_float16_becomes_bfloat16_on_a_cpu_without_float16(
    asked: str,
    is_slow: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connect, "slow_dtype_advice", lambda _: "slow" if is_slow else None)
    config = cast("EngineConfig", SimpleNamespace(dtype=asked))
    model = cast("ModelConfig", SimpleNamespace(dtype=torch.float16, formats=UNQUANTISED))
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    with caplog.at_level("INFO", logger="minisgl.engine.connect"):
        assert resolve_dtype(config, model, device) == expected
    assert ("become bfloat16" in caplog.text) == (expected == torch.bfloat16)


@pytest.mark.parametrize("is_quantised", [True, False])
def test_float32_is_advised_for_plain_weights_only(
    is_quantised: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU's kernels of quantised weights compute in bfloat16: in float32 each GEMM would first
    dequantise its weight, and so would loading a GGUF file."""
    advice = "--dtype float32 computes them faster"
    monkeypatch.setattr(connect, "slow_dtype_advice", lambda _: advice)
    config = cast("EngineConfig", SimpleNamespace(dtype="bfloat16"))
    formats: Any = UNQUANTISED
    if is_quantised:
        online = pytest.importorskip("minisgl_zoo.weights.online_formats", reason="the zoo's")
        formats = online.OnlineFormats.of_kind("int8", 2)
    model = cast("ModelConfig", SimpleNamespace(dtype=torch.bfloat16, formats=formats))
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    with caplog.at_level("INFO", logger="minisgl.engine.connect"):
        assert resolve_dtype(config, model, device) == torch.bfloat16
    assert (advice in caplog.text) == (not is_quantised)
