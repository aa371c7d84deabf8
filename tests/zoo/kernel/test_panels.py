"""Weights of few bits in the CPU's panels: their values, and GEMMs against float64.

Planted once, and noticed: nibbles of two steps exchanged, zeros that are not packed, the scales of
all matrices of a stack taken from its first.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import gemms
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import CFLAGS, CSRC, load_library, own_flags
from minisgl.kernel.ops import Ops
from minisgl.quantization.parameter import Part, Stack
from minisgl.quantization.weight import WeightBuild
from minisgl_zoo.weights.fp4 import Fp4
from minisgl_zoo.weights.grouped import Grouped
from minisgl_zoo.weights.quantised import QuantisedWeight
from minisgl_zoo.weights.scaled import Scaled

BF16, CPU = torch.bfloat16, torch.device("cpu")
OUT, IN = 96, 384
ROWS = (1, 2, 5, 8, 13, 100)
CASES = [
    "int8 row", "int8 matrix", "int8 group 64", "fp8 row", "fp8 block", "fp8 matrix",
    "int4 32", "int4 128", "int4 row", "int4 32 zero", "uint8 128 zero", "mxfp4",
]  # fmt: skip
INT_BOUND = 2**-12
"""Of the largest result: what rounding of the inputs to int16 adds to bfloat16's error."""


def make(case: str, ops: Ops, stacked: int | None = None) -> QuantisedWeight:
    """A weight with drawn numbers, not packed yet."""
    parts = [Part.whole("a.weight", OUT, IN), Part.whole("b.weight", OUT, IN)]
    if stacked:
        parts *= stacked
    unit = {"row": (1, 0), "matrix": (0, 0), "block": (128, 128), "group": (1, 64)}
    kind, *words = case.split()
    weight: QuantisedWeight
    if case == "mxfp4":
        parts = [
            Part(
                name=f"{index}.weight", shape=(OUT, IN), axis=0, share=range(OUT),
                stack=Stack("s", (len(parts), OUT, IN), index, 0),
            )
            for index in range(len(parts))
        ]  # fmt: skip
        weight = Fp4(spelling="gpt-oss")(
            WeightBuild(ops=ops, dtype=BF16, parts=parts, stacked=stacked)
        )
    elif kind == "fp8" or (kind == "int8" and words):
        number = torch.float8_e4m3fn if kind == "fp8" else torch.int8
        weight = Scaled(number=number, unit=unit[words[0]])(
            WeightBuild(ops=ops, dtype=BF16, parts=parts, stacked=stacked)
        )
    else:
        group = 0 if words[0] == "row" else int(words[0])
        weight = Grouped(
            spelling="compressed-tensors", bits=4 if kind == "int4" else 8, group=group,
            has_zero="zero" in words, act_order=False,
        )(WeightBuild(ops=ops, dtype=BF16, parts=parts, stacked=stacked))  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for parameter in weight.parameters():
        shape, dtype = parameter.shape, parameter.dtype
        if parameter.attr == "scale" and dtype == torch.uint8:
            tensor = torch.randint(118, 124, shape, dtype=dtype, generator=generator)
        elif dtype == torch.float32:
            tensor = torch.rand(shape, generator=generator) * 0.01 + 0.001
        elif parameter.attr == "zero":
            most = 16 if kind == "int4" else 256
            tensor = torch.randint(0, most, shape, dtype=dtype, generator=generator)
        else:
            tensor = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            if dtype == torch.float8_e4m3fn:
                tensor[(tensor & 127) == 127] = 3  # not a number, and a subnormal one
            tensor = tensor.view(dtype)
        parameter.set(tensor)
    return weight


@pytest.fixture(scope="module")
def fast() -> CpuOps:
    return CpuOps(load_library())


def exact(x: Tensor, dense: Tensor, bias: Tensor | None, is_gated: bool) -> Tensor:
    y = F.linear(x.double(), dense.double(), None if bias is None else bias.double())
    if not is_gated:
        return y
    gate, up = y.bfloat16().double().chunk(2, -1)
    return F.silu(gate) * up


def check(weight: QuantisedWeight, dense: Tensor, rows: int) -> None:
    """dense: the numbers in float32."""
    x = torch.randn(rows, IN).to(BF16)
    x[:, 7] *= 300  # what models' activations have
    bias = torch.randn(len(dense)).to(BF16)
    for added, is_gated in ((None, False), (bias, False), (bias, True)):
        y = weight.linear(x, added, "silu" if is_gated else None)
        expected = exact(x, dense, added, is_gated)
        assert y.dtype == BF16
        bound = 2**-8 * expected.abs() + INT_BOUND * expected.abs().max()
        if is_gated:
            bound = 2**-6 * expected.abs() + 2**-8 * expected.abs().max()
        worst = ((y.double() - expected).abs() / bound).max()
        assert worst <= 1, f"{rows} rows, gated {is_gated}: {worst:.2f} of the bound"


def float32(case: str, stacked: int | None = None) -> Tensor:
    weight = make(case, Ops(), stacked)
    weight.dtype = torch.float32
    weight.init_buffers(CPU)
    return weight.dense()


@pytest.mark.parametrize("case", CASES)
def test_gemms(fast: CpuOps, case: str) -> None:
    dense, weight = float32(case), make(case, fast)
    weight.init_buffers(CPU)
    assert weight.panels is not None
    assert torch.equal(weight.dense(), dense.to(BF16)), "unpacked"
    for rows in ROWS:
        check(weight, dense, rows)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_rows_of_an_int8_table(fast: CpuOps, ids_dtype: torch.dtype) -> None:
    dense, weight = float32("int8 row"), make("int8 row", fast)
    weight.init_buffers(CPU)
    assert weight.panels is not None
    ids = torch.randint(0, len(dense), (30,), dtype=ids_dtype)
    assert torch.equal(weight.panels.rows(fast, ids), dense[ids].to(BF16))


@pytest.mark.parametrize("case", ["int4 32 zero", "int8 row", "fp8 block", "mxfp4"])
def test_a_stack_of_experts(fast: CpuOps, case: str) -> None:
    dense, weight = float32(case, 3), make(case, fast, 3)
    weight.init_buffers(CPU)
    for index in range(3):
        check(weight[index], dense[index], 3)


def test_norm_and_residual(fast: CpuOps) -> None:
    weight = make("int4 128", fast)
    weight.init_buffers(CPU)
    x, residual = torch.randn(2, 3, IN).to(BF16).unbind()
    norm = torch.randn(IN).to(BF16)
    for other in (None, residual):
        ours = weight.norm_linear(x, other, norm, 1e-6, None, "silu")
        total = x if other is None else x + other
        theirs = weight.linear(fast.rms_norm(total, norm, 1e-6), None, "silu")
        assert torch.equal(ours[0], theirs)
        assert torch.equal(ours[1], total)


def test_a_damaged_input_stays_visible(fast: CpuOps) -> None:
    weight = make("int8 row", fast)
    weight.init_buffers(CPU)
    for damage in (float("nan"), float("inf")):
        x = torch.randn(3, IN).to(BF16)
        x[1, 40] = damage
        assert weight.linear(x).isfinite().all(-1).tolist() == [True, False, True]


def test_weights_that_the_kernels_do_not_take_are_dequantised(fast: CpuOps) -> None:
    parts = [Part.whole("a.weight", 24, 36)]
    weight = Scaled(number=torch.int8, unit=(1, 0))(WeightBuild(ops=fast, dtype=BF16, parts=parts))
    for parameter in weight.parameters():
        parameter.set(torch.ones(parameter.shape, dtype=parameter.dtype))
    weight.init_buffers(CPU)
    assert weight.panels is None
    assert torch.equal(weight.linear(torch.ones(2, 36).to(BF16)), torch.full((2, 24), 36.0))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize(
    "flags", [("-mno-avx512vnni", "-mno-avx512bf16"), ("-mno-avx512f",), ("-march=x86-64",)]
)
def test_each_instruction_set(flags: tuple[str, ...], tmp_path: Path) -> None:
    """These panels, and those of bfloat16. One file has both: most of it is headers. Functions that
    are inlined by force would take a third of the compiler's time."""
    import tvm_ffi
    from tvm_ffi import cpp

    class Library:
        """The GEMMs are compiled with `flags`, the other functions for this machine."""

        def __init__(self) -> None:
            self._built = tvm_ffi.load_module(path)
            self._rest = load_library()

        def __getattr__(self, name: str) -> Any:
            built = ("pack", "unpack", "packed_rows", "packed_linear", "numbers_linear")
            return getattr(self._built if name in built else self._rest, name)

    sources = shutil.copytree(CSRC, tmp_path / "csrc")
    header = (CSRC / "vec.h").read_text()
    forced = "#define INLINE inline __attribute__((always_inline))\n"
    assert forced in header
    (sources / "vec.h").write_text(header.replace(forced, "#define INLINE inline\n"))
    both = tmp_path / "both.cpp"
    both.write_text('#include "linear.cpp"\n#include "numbers.cpp"\n')
    path = cpp.build(
        "both",
        sources=[str(both)],
        extra_cflags=[*CFLAGS, *own_flags(), "-O0", *flags, "-mno-avx512vbmi"],
        extra_ldflags=["-pthread"],
        extra_include_paths=[str(sources)],
        build_directory=str(tmp_path),
    )
    ops = CpuOps(Library())
    for case in ("int8 row", "int4 32 zero", "fp8 block", "mxfp4"):
        weight = make(case, ops)
        weight.init_buffers(CPU)
        for rows in (1, 7):
            check(weight, float32(case), rows)
    for rows in (1, 2, 13, 100):
        dense, x, bias = gemms.draw(160, 34, rows)
        packed = dense.clone()
        ops.pack(packed)
        expected = gemms.exact(x, dense, bias, "silu")
        theirs = gemms.error(Ops().linear(x, dense, bias, "silu"), expected)
        assert gemms.error(ops.packed_linear(x, packed, bias, "silu"), expected) <= 1.2 * theirs
