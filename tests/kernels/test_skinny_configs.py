"""The configs of skinny GEMMs. The kernel itself runs on GPUs (tests/gpu/test_skinny.py)."""

from __future__ import annotations

import pytest
import torch

from helpers.hopper_kernels import uncompiled
from minisgl.kernel.once import JitUnavailable
from minisgl_kernels.hopper import INPUTS, SHARED_BYTES, Kernels, multiply_source
from minisgl_kernels.skinny import (
    LARGE,
    MAX_ROWS,
    SMALL,
    SkinnyGemms,
    choose_config,
)

H200 = (132, 132, 117, 120, 110, 102, 105, 120)  # blocks at once, in clusters of 1, 2, ...
SHAPES = [
    (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),  # 0.6B
    (17_408, 5120, True), (5120, 17_408, False),  # 14B
    (2560, 5120, False), (5120, 2048, False), (6400, 5120, True),  # a quarter of 32B
    (8, 64, False), (40, 128, True), (72, 320, False), (2048, 192, True), (128, 2048, False),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "inputs", "gated"), SHAPES)
def test_a_config_fits_the_device(outputs: int, inputs: int, gated: bool) -> None:
    config = choose_config(outputs, inputs, gated, H200)
    assert config is not None
    assert config.gated == gated
    assert config.num_blocks(outputs) <= H200[config.split - 1]
    assert config.split * INPUTS <= inputs
    for rows in range(1, MAX_ROWS + 1):
        stages = config.stages(rows, inputs)
        last = (stages - 1) * config.stage_bytes(rows)
        # The matrix instructions of the last stage read whole tiles of 64 rows.
        assert last + MAX_ROWS * INPUTS * 2 <= config.shared_bytes(rows, inputs)
        assert stages * (config.stage_bytes(rows) + 16) < config.shared_bytes(rows, inputs)
        assert config.shared_bytes(rows, inputs) <= SHARED_BYTES
        # Else both warpgroups would wait on one barrier, and take one turn for another.
        assert config.halves or stages % 2 == 0


def test_all_outputs_are_made_once() -> None:
    for outputs, inputs, gated in SHAPES:
        config = choose_config(outputs, inputs, gated, H200)
        assert config is not None
        tiles = config.num_blocks(outputs) // config.split
        made = config.width // 2 if gated else config.width
        assert (tiles - 1) * made < outputs <= tiles * made


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (7168, 5120, False),  # 37 million, between SMALL and LARGE
        (151_936, 1024, False),  # more blocks than run at once
        (64, 100, False),  # not whole turns
        (12, 64, False),  # not whole chunks
    ],
)
def test_what_is_left_to_cublas(outputs: int, inputs: int, gated: bool) -> None:
    assert choose_config(outputs, inputs, gated, H200) is None


def test_sizes_count_gate_and_up() -> None:
    inputs = 4096
    outputs = SMALL // inputs
    assert choose_config(outputs, inputs, False, H200) is not None
    assert choose_config(outputs, inputs, True, H200) is None
    assert choose_config(LARGE // inputs // 2, inputs, True, H200) is not None


def test_the_instruction_has_an_operand_for_each_sum() -> None:
    """And two for the matrices, and one that says whether it adds to the sums."""
    source = multiply_source(48, "f16")
    text = "".join(source.split('"')[1::2])
    assert "m64n48k16.f32.f16.f16" in text
    assert source.count('"+f"') == 24
    assert "%24, %25, add, 1, 1, 0, 0" in text
    assert "setp.ne.b32 add, %26, 0" in text
    text = "".join(multiply_source(48, "e4m3").split('"')[1::2])
    assert "m64n48k32.f32.e4m3.e4m3" in text
    assert "%24, %25, add, 1, 1;" in text


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> SkinnyGemms:
    """As on an H200, without one: nothing is compiled or launched."""
    gemms = SkinnyGemms.__new__(SkinnyGemms)
    gemms._max_blocks, gemms._kernels = H200, uncompiled("left to cuBLAS")
    monkeypatch.setattr(Kernels, "make", lambda self, kind: 1)
    return gemms


def _tensors(rows: int = 4, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return torch.zeros(rows, 1024, dtype=dtype), torch.zeros(4096, 1024, dtype=dtype)


def test_what_the_kernel_takes(gemms: SkinnyGemms) -> None:
    for rows in (1, 4, MAX_ROWS):
        assert gemms.config(*_tensors(rows)) is not None
    assert gemms.config(*_tensors(dtype=torch.float16), gated=True) is not None


def test_what_the_kernel_does_not_take(gemms: SkinnyGemms) -> None:
    x, weight = _tensors()
    assert gemms.config(x[:0], weight) is None  # a step that samples nothing
    assert gemms.config(*_tensors(MAX_ROWS + 1)) is None
    assert gemms.config(*_tensors(dtype=torch.float32)) is None
    assert gemms.config(x.half(), weight) is None
    assert gemms.config(x[None], weight) is None
    assert gemms.config(x[:, :512], weight[:, :512]) is None  # not contiguous
    assert gemms.config(x, weight.reshape(8192, 512)) is None  # not of that many inputs
    odd = torch.zeros(4 * 1024 + 1, dtype=torch.bfloat16)[1:].view(4, 1024)
    assert gemms.config(odd, weight) is None  # not aligned
    assert gemms.config(x, odd) is None


def test_what_cannot_be_compiled_is_cublass(
    gemms: SkinnyGemms, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(self: object, kind: object) -> int:
        calls.append(kind)
        raise JitUnavailable("no space left")

    monkeypatch.setattr(Kernels, "make", fail)
    assert gemms.config(*_tensors()) is None
    assert gemms.config(*_tensors()) is None
    assert len(calls) == 1
