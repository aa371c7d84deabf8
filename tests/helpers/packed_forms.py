"""Random packed weights of every form, and the numbers for which they stand."""

from __future__ import annotations

from typing import Any

import torch

from minisgl.kernel.triton.launch import INTERPRET
from minisgl_zoo.weights.fp4 import E2M1
from minisgl_zoo.weights.quantised import Packed

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
    "int4 zeros of 64": {"kind": "int4", "group": 64, "zero": True},
    "int4 zeros of 128": {"kind": "int4", "group": 128, "zero": True},
    "int4 of AWQ": {"kind": "int4", "group": 128, "zero": True, "scale_dtype": torch.float16},
    "MXFP4": {"kind": "fp4", "group": 32},
    "NVFP4": {"kind": "fp4", "group": 16, "outer": True},
}


def make(
    shape: tuple[int, ...], kind: Any, group: int = 0, rows: int = 1, zero: bool = False,
    outer: bool = False, device: torch.device | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Packed, torch.Tensor]:  # fmt: skip
    """A random packed weight, and the float64 numbers for which it stands. scale_dtype: of int4."""
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
            scale = scale.to(scale_dtype)
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


def check(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    assert error <= tolerance, error
