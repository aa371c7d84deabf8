"""Kernels that read packed weights against float64, and formats against their dequantised
values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.packed_forms import DTYPE, FORMS, INTERPRET, TOLERANCE, check, make
from minisgl.kernel.ops import Ops
from minisgl.quantization import Part
from minisgl.quantization.weight import WeightBuild
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.packed import PackedGemms
from minisgl_kernels.packed_grouped import PackedGrouped
from minisgl_kernels.packed_skinny import MAX_FP8_ROWS, PackedSkinny, takes
from minisgl_kernels.triton import packed_gemv
from minisgl_kernels.triton.arrange import arrange
from minisgl_kernels.triton.packed import dense
from minisgl_kernels.triton.packed_gemm import TileConfig, packed_gemm
from minisgl_zoo.weights.cut import ALL
from minisgl_zoo.weights.fp4 import Fp4
from minisgl_zoo.weights.grouped import Grouped
from minisgl_zoo.weights.scaled import Scaled


@pytest.fixture
def ops(device: torch.device) -> TunedOps:
    if INTERPRET:
        return TunedOps()
    skinny, grouped = on_hopper(PackedSkinny, "no skinny GEMMs"), on_hopper(PackedGrouped, "none")
    return TunedOps(packed_skinny=skinny, packed_grouped=grouped)


@pytest.mark.parametrize("form", FORMS)
def test_gemms_of_every_number_of_rows(form: str, ops: TunedOps, device: torch.device) -> None:
    weight, values = make((192, 352 if "rows" in form else 384), device=device, **FORMS[form])
    inputs = values.shape[1]
    check(dense(weight, DTYPE), values)
    gemms = PackedGemms(ops, weight, DTYPE)
    bias = torch.randn(192, device=device).to(DTYPE)
    for rows in (1, 5) if INTERPRET else (1, 2, 5, 8, 9, 16, 33, 64, 100, 256, 300):
        x = (torch.randn(rows, inputs, device=device) / 8).to(DTYPE)
        check(gemms.linear(x, bias, None), x.double() @ values.T + bias.double())
    norm = torch.rand(inputs, device=device).to(DTYPE)
    gates: tuple[Any, ...] = (None, "silu", "gelu_tanh")
    for rows, gate in zip((1, 3, 8), gates, strict=True):
        x, residual = ((torch.randn(rows, inputs, device=device) / 8).to(DTYPE) for _ in range(2))
        wide = (x.double(), residual.double(), norm.double())
        want = Ops().norm_linear(*wide, 1e-6, values, bias.double(), gate)
        got = gemms.norm_linear(x, residual, norm, 1e-6, bias, gate)
        for each, expected in zip(got, want, strict=True):
            check(each, expected, 2 * TOLERANCE)


@pytest.mark.skipif(INTERPRET, reason="CUDA C++ needs a GPU")
@pytest.mark.parametrize("form", FORMS)
def test_skinny_gemms_of_real_sizes(form: str, ops: TunedOps, device: torch.device) -> None:
    """Several tiles of a block, chunks that end within a tile, rows of different lengths."""
    if ops.packed_skinny is None:
        pytest.skip("skinny GEMMs by packed weights are for Hopper")
    for outputs, inputs in ((7168, 1024), (192, 5120), (4096, 2880)):
        if inputs % 128 and FORMS[form].get("group", 0) > 64:
            continue
        weight, values = make((outputs, inputs), device=device, **FORMS[form])
        for rows in (1, 4, 7):
            if weight.kind == "fp8" and rows > MAX_FP8_ROWS:
                continue  # Triton's
            x = (torch.randn(rows, inputs, device=device) / 8).to(DTYPE)
            bias = torch.randn(outputs, device=device).to(DTYPE)
            got = ops.packed_skinny.norm_linear(x, None, None, 0.0, weight, bias, None)
            assert (got is None) == (not takes(weight))
            if got:
                check(got[0], x.double() @ values.T + bias.double())


@pytest.mark.parametrize("form", ["fp8 blocks", "int4 zeros", "NVFP4"])
def test_programs_may_share_the_inputs(form: str, device: torch.device) -> None:
    weight, values = make((192, 384), device=device, **FORMS[form])
    done = torch.zeros(64, dtype=torch.int32, device=device)
    x = (torch.randn(21, 384, device=device) / 8).to(DTYPE)
    k = weight.group if weight.group >= 32 else 128
    for split in (2, 3):
        got = packed_gemm(x, weight, None, TileConfig(m=16, n=64, k=k, split=split), done)
        check(got, x.double() @ values.T)
        assert not done.any()


@pytest.mark.parametrize(
    ("turn", "first"),
    [
        (128, [0, 4, 32, 36, 64, 68, 96, 100, 1, 5, 33, 37, 65, 69, 97, 101]),
        (64, [0, 2, 16, 18, 32, 34, 48, 50, 1, 3, 17, 19, 33, 35, 49, 51]),
    ],
    ids=["4 bits", "8 bits"],
)
def test_columns_come_in_the_order_of_decoding(
    turn: int, first: list[int], device: torch.device
) -> None:
    """Pairs of places get numbers 4 apart of a word of 4-bit numbers, or 2 apart of 8-bit ones."""
    x = torch.arange(2 * 320, device=device).view(2, 320).to(DTYPE)
    got = arrange(x, turn, 0.5).double() * 2
    assert got.shape == (2, 384)
    assert got[0, :16].tolist() == first
    turns = got.view(2, -1, turn).sort(-1).values
    want = torch.nn.functional.pad(x.double(), (0, 64)).view(2, -1, turn).sort(-1).values
    assert torch.equal(turns, want)


GROUPED = {
    "spelling": "compressed-tensors", "bits": 4, "group": 32, "has_zero": True, "act_order": False
}  # fmt: skip
FORMATS: dict[str, Callable[..., Any]] = {
    "fp8 matrix": Scaled(number=torch.float8_e4m3fn, unit=(ALL, ALL)),
    "fp8 row": Scaled(number=torch.float8_e4m3fn, unit=(1, ALL)),
    "fp8 blocks": Scaled(number=torch.float8_e4m3fn, unit=(64, 128)),
    "fp8 blocks of other rows": Scaled(number=torch.float8_e4m3fn, unit=(128, 128)),
    "int8 group": Scaled(number=torch.int8, unit=(1, 64)),
    "int4": Grouped(**GROUPED),
    "int4 row": Grouped(**{**GROUPED, "group": ALL, "has_zero": False}),
    "int8 zeros": Grouped(**{**GROUPED, "bits": 8}),
    "NVFP4": Fp4(spelling="modelopt"),
}


@pytest.mark.parametrize("stacked", [None, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_give_kernels_their_values(
    name: str, stacked: int | None, device: torch.device
) -> None:
    """Of merged matrices, each with scales of its own."""
    parts = [Part.whole(f"{i}.weight", rows, 256) for i, rows in enumerate((128, 64))]
    weight = FORMATS[name](
        WeightBuild(ops=TunedOps(), dtype=DTYPE, parts=parts * (stacked or 1), stacked=stacked)
    )
    for parameter in list(weight.parameters()):
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
        if parameter.dtype in (torch.uint8, torch.int8):
            tensor.random_(0, 120 if parameter.dtype == torch.int8 else 256)
        else:
            tensor.copy_(torch.rand(parameter.shape) / 8 + 0.01)
        parameter.set(tensor.to(device))
    weight.init_buffers(device)
    packed = weight.packed_form()
    assert packed
    assert packed.shape == weight.dense().shape
    assert packed.rows == (64 if name == "fp8 blocks" else 1)
    check(dense(packed, DTYPE), weight.dense().double(), 1e-3 if INTERPRET else 8e-3)


def test_a_second_tile_of_a_row_may_be_partly_full(device: torch.device) -> None:
    """Two tiles of one row, of which the second is not full."""
    weight, values = make((64, 32 * 21), device=device, **FORMS["int4 rows"])
    x = (torch.randn(1, 32 * 21, device=device) / 8).to(DTYPE)
    y, total = packed_gemv.norm_linear(x, None, None, 0.0, weight, None, "gelu_tanh")
    assert total is x
    check(y, Ops().linear(x.double(), values, None, "gelu_tanh"))
