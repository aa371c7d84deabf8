"""Kernels that read packed weights against float64, and formats against their dequantised
values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import INTERPRET
from helpers.moe_cases import ACTIVATIONS, exact

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.cuda import CudaOps
from minisgl.kernel.hopper import on_hopper
from minisgl.kernel.ops import Ops
from minisgl.kernel.packed import PackedGemms
from minisgl.kernel.packed_grouped import PackedGrouped
from minisgl.kernel.packed_skinny import MAX_FP8_ROWS, MAX_ROWS, PackedSkinny, takes
from minisgl.kernel.triton import packed_gemv
from minisgl.kernel.triton.arrange import arrange
from minisgl.kernel.triton.packed import Packed, dense
from minisgl.kernel.triton.packed_gemm import TileConfig, packed_gemm
from minisgl.moe.base import Experts, SquaredRelu
from minisgl.moe.fused import gate_of
from minisgl.moe.packed import PackedMoeBackend
from minisgl.quantization import Part
from minisgl.quantization.cut import ALL
from minisgl.quantization.fp4 import E2M1, Fp4
from minisgl.quantization.grouped import Grouped
from minisgl.quantization.scaled import Scaled
from minisgl.quantization.weight import WeightBuild

DTYPE = torch.float16 if INTERPRET else torch.bfloat16  # which Triton's interpreter computes wrong
TOLERANCE = 2e-3 if INTERPRET else 1.2e-2
"""Of the largest number: a rounding or two of 16-bit numbers."""
FORMS: dict[str, dict[str, Any]] = {
    "fp8 rows": {"kind": "fp8"},
    "fp8 blocks": {"kind": "fp8", "group": 128, "rows": 64},
    "fp8 groups": {"kind": "fp8", "group": 128},
    "int8 rows": {"kind": "int8"},
    "int8 groups": {"kind": "int8", "group": 64},
    "uint8 zeros": {"kind": "uint8", "group": 64, "zero": True},
    "uint8": {"kind": "uint8", "group": 128},
    "int4": {"kind": "int4", "group": 128},
    "int4 rows": {"kind": "int4"},
    "int4 zeros": {"kind": "int4", "group": 32, "zero": True},
    "int4 zeros of 128": {"kind": "int4", "group": 128, "zero": True},
    "MXFP4": {"kind": "fp4", "group": 32},
    "NVFP4": {"kind": "fp4", "group": 16, "outer": True},
}


def make(
    shape: tuple[int, ...], kind: Any, group: int = 0, rows: int = 1, zero: bool = False,
    outer: bool = False, device: torch.device | None = None,
) -> tuple[Packed, torch.Tensor]:  # fmt: skip
    """A random packed weight, and the float64 numbers for which it stands."""
    draw = torch.Generator().manual_seed(sum(shape))
    *others, count, inputs = shape
    groups = -(-inputs // group) if group else 0

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, (*others, *size), generator=draw, dtype=torch.int32)

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = values.double().repeat_interleave(group, -1)[..., :inputs]
        return wide.repeat_interleave(count // values.shape[-2], -2)

    parts: dict[str, torch.Tensor] = {}
    if kind == "fp8":
        numbers = torch.randn(shape, generator=draw).to(torch.float8_e4m3fn)
        values = numbers.double()
    elif kind in ("int8", "uint8"):
        dtype = torch.int8 if kind == "int8" else torch.uint8
        numbers = (integers(0, 256, count, inputs) - 128 * (kind == "int8")).to(dtype)
        values = numbers.double()
    else:
        nibbles = integers(0, 16, count, inputs).to(torch.uint8)
        numbers = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(torch.int32)
        signed = torch.tensor([*E2M1, *(-value for value in E2M1)]).double()
        values = nibbles.double() if kind == "int4" else signed[nibbles.long()]
    middle = {"uint8": 128, "int4": 8}.get(kind, 0)
    if zero:
        parts["zero"] = integers(0, 2 * middle, count, groups).to(torch.uint8)
        values = values - spread(parts["zero"])
    else:
        values = values - middle
    if group:
        scale = (torch.rand(*others, count // rows, groups, generator=draw) + 0.5) / 8
        factors = scale
        if group == 32 and kind == "fp4":
            scale = integers(120, 128, count, groups).to(torch.uint8)
            factors = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
        elif kind == "fp4":
            scale = scale.to(torch.float8_e4m3fn)
            factors = scale.float()
        elif kind == "int4":
            scale = scale.bfloat16()
            factors = scale.float()
        parts["scale"] = scale
        values = values * spread(factors)
    if outer or not group:
        parts["outer"] = (torch.rand(*others, count, generator=draw) + 0.5) / 8
        values = values * parts["outer"].double()[..., None]
    if kind in ("int8", "uint8"):
        values, key = values / 16, "scale" if group else "outer"
        parts[key] = parts[key] / 16
    tensors = {name: tensor.to(device) for name, tensor in parts.items()}
    return (
        Packed(
            kind=kind, numbers=numbers.to(device), group=group, rows=rows, middle=middle, **tensors
        ),
        values.to(device),
    )  # fmt: skip


@pytest.fixture
def ops(device: torch.device) -> CudaOps:
    skinny = None if INTERPRET else on_hopper(PackedSkinny, "no skinny GEMMs")
    return CudaOps(packed_skinny=skinny)


def check(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    assert error <= tolerance, error


@pytest.mark.parametrize("form", FORMS)
def test_gemms_of_every_number_of_rows(form: str, ops: CudaOps, device: torch.device) -> None:
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
def test_skinny_gemms_of_real_sizes(form: str, ops: CudaOps, device: torch.device) -> None:
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


class Stack:
    """A weight of experts as layers hold it."""

    def __init__(self, packed: Packed, values: torch.Tensor) -> None:
        self.packed_stack, self._values = packed, values

    def dense(self) -> torch.Tensor:
        return self._values


def check_experts(
    form: str,
    tokens: int,
    ops: CudaOps,
    device: torch.device,
    *,
    hidden: int = 128,
    inner: int = 128,
    grouped: PackedGrouped | None = None,
    tolerance: float = 3 * TOLERANCE,
    **kind: Any,
) -> None:
    """Two of six experts for each token; experts 1 to 4 are here."""
    rows = inner * (1 if isinstance(kind.get("activation"), SquaredRelu) else 2)
    gate_up, up_values = make((4, rows, hidden), device=device, **FORMS[form])
    down, down_values = make((4, hidden, inner), device=device, **FORMS[form])
    x = (torch.randn(tokens, hidden, device=device) / 8).to(DTYPE)
    weights = torch.rand(tokens, 2, device=device)
    ids = torch.tensor([(t % 6, (t + 1) % 6) for t in range(tokens)], dtype=torch.int32).to(device)
    stacks: Any = {"gate_up": Stack(gate_up, up_values), "down": Stack(down, down_values)}
    experts = Experts(**stacks, count=4, first=1, total=6, top_k=2, renormalise=True, **kind)
    backend = PackedMoeBackend(ops, grouped)
    got = backend.routed(x, weights, ids, experts)
    check(got, exact(x, weights, ids, experts), tolerance)
    if grouped:
        assert grouped.takes(x, gate_up, down, gate_of(experts)) == (form in GROUPED_FORMS)
        assert torch.equal(backend.routed(x, weights, ids, experts), got)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS, 11])
def test_experts(form: str, tokens: int, ops: CudaOps, device: torch.device) -> None:
    check_experts(form, tokens, ops, device)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, MAX_ROWS, 11])
def test_experts_with_biases_and_other_activations(
    name: str, tokens: int, ops: CudaOps, device: torch.device
) -> None:
    """Kernels read the packed weights: dequantising gpt-oss's took 4 GiB more in each step."""
    activation, has_bias = ACTIVATIONS[name]
    biases: dict[str, Any] = {}
    if has_bias:
        biases["gate_up_bias"] = torch.randn(4, 256, device=device).to(DTYPE)
        biases["down_bias"] = torch.randn(4, 128, device=device).to(DTYPE)
    check_experts("MXFP4", tokens, ops, device, activation=activation, **biases)


GROUPED_FORMS = ("fp8 rows", "fp8 blocks", "fp8 groups", "int8 rows", "int8 groups", "int4",
                 "int4 rows", "int4 zeros of 128", "MXFP4", "NVFP4")  # fmt: skip
"""Those that `PackedGrouped` reads. It leaves groups of 32 integers, and uint8, to Triton."""


@pytest.fixture(scope="module")
def grouped() -> PackedGrouped:
    made = None if INTERPRET else on_hopper(PackedGrouped, "no grouped GEMMs")
    if made is None:
        pytest.skip("grouped GEMMs by packed weights are for Hopper")
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [9, 150, 1000])
def test_grouped_gemms_of_experts(
    form: str, tokens: int, device: torch.device, grouped: PackedGrouped
) -> None:
    """Tiles of one to eight columns of 16, rows of weights and inputs that do not fill a tile."""
    check_experts(
        form, tokens, CudaOps(), device,
        hidden=448, inner=320, grouped=grouped, tolerance=TOLERANCE,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-oss", "gelu"])
def test_grouped_gemms_with_biases_and_other_activations(
    name: str, device: torch.device, grouped: PackedGrouped
) -> None:
    activation, has_bias = ACTIVATIONS[name]
    biases: dict[str, Any] = {}
    if has_bias:
        biases["gate_up_bias"] = torch.randn(4, 640, device=device).to(DTYPE)
        biases["down_bias"] = torch.randn(4, 448, device=device).to(DTYPE)
    check_experts(
        "MXFP4", 200, CudaOps(), device, hidden=448, inner=320, grouped=grouped,
        tolerance=TOLERANCE, activation=activation, **biases,
    )  # fmt: skip


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
        WeightBuild(ops=CudaOps(), dtype=DTYPE, parts=parts * (stacked or 1), stacked=stacked)
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
