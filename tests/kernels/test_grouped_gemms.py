"""Which experts our grouped GEMMs for Hopper take; the kernel itself runs on GPUs."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from helpers.hopper_kernels import uncompiled
from minisgl.kernel.once import JitUnavailable
from minisgl_kernels.grouped import (
    MAX_EXPERTS,
    MOST,
    STAGE_BYTES,
    STEP,
    GroupedGemms,
    Task,
    shared_bytes,
)
from minisgl_kernels.hopper import SHARED_BYTES, Kernels


def test_a_block_has_the_memory_that_is_asked_for() -> None:
    assert shared_bytes(STAGE_BYTES, MOST, MAX_EXPERTS) <= SHARED_BYTES


def test_what_is_handed_over_is_laid_out_as_the_kernel_reads_it() -> None:
    names = ("x", "out", "counts", "rows", "scales", "experts", "groups", "x_stride", "scale")
    assert [getattr(Task, name).offset for name in names] == [0, 8, 16, 24, 32, 40, 64, 68, 72]
    assert [getattr(Task, name).offset for name in ("bias", "x_scales", "limit")] == [96, 104, 116]
    assert [getattr(Task, name).offset for name in ("partial", "done")] == [120, 128]
    assert ctypes.sizeof(Task) == 136
    assert MOST % STEP == 0


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> GroupedGemms:
    """As on an H200, without one: nothing is compiled or launched."""
    gemms = GroupedGemms.__new__(GroupedGemms)
    gemms._kernels = uncompiled("left to Triton")
    monkeypatch.setattr(Kernels, "make", lambda self, kind: 1)
    return gemms


def _tensors(
    experts: int = 4, hidden: int = 128, inner: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.zeros(3, hidden, dtype=dtype),
        torch.zeros(experts, 2 * inner, hidden, dtype=dtype),
        torch.zeros(experts, hidden, inner, dtype=dtype),
    )


def test_takes_16_bit_experts_of_whole_turns(gemms: GroupedGemms) -> None:
    assert gemms.takes(*_tensors())
    assert gemms.takes(*_tensors(dtype=torch.float16))
    assert gemms.takes(*_tensors(experts=MAX_EXPERTS))
    assert not gemms.takes(*_tensors(dtype=torch.float32))
    assert not gemms.takes(*_tensors(hidden=72))
    assert not gemms.takes(*_tensors(inner=40))
    assert not gemms.takes(*_tensors(experts=MAX_EXPERTS + 1))


def test_what_does_not_compile_is_left_to_triton(
    gemms: GroupedGemms, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []

    def fail(self: object, kind: object) -> int:
        attempts.append(kind)
        raise JitUnavailable("the disk is full")

    monkeypatch.setattr(Kernels, "make", fail)
    for _ in range(3):
        assert not gemms.takes(*_tensors())
    assert len(attempts) == 1, "tried again at every step"
    assert "left to Triton: the disk is full" in caplog.text
