"""CUDA C++ that cannot be compiled here is refused with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minisgl.kernel.once import JitUnavailable
from minisgl_kernels.cubin import load_cubin


def test_without_nvrtc_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(JitUnavailable, match=r"no NVRTC, .*: import of cuda"):
        load_cubin(Path("csrc"), "all_reduce", "sm_90")
    monkeypatch.setenv("MINISGL_DISABLE_JIT", "1")
    with pytest.raises(JitUnavailable, match="MINISGL_DISABLE_JIT=1"):
        load_cubin(Path("csrc"), "all_reduce", "sm_90")
