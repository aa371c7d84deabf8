"""Norms and gated activations: one pass over memory each, rounded as the reference rounds.

Axes: M rows, D their size, F intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATION_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`; the last axis of x is contiguous."""
    x_MD = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x_MD.shape[1]
    _rms_norm[(len(x_MD),)](
        x_MD, x_MD, weight, out, out, x_MD.stride(0), eps, size,
        ADD=False, BLOCK=triton.next_power_of_2(size), num_warps=_warps(size),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Ops.add_rms_norm`; both arguments are contiguous."""
    size = x.shape[-1]
    out, total = torch.empty_like(x), torch.empty_like(x)
    _rms_norm[(x.numel() // size,)](
        x, residual, weight, out, total, size, eps, size,
        ADD=True, BLOCK=triton.next_power_of_2(size), num_warps=_warps(size),
    )  # fmt: skip
    return out, total


def gated(gate_up: Tensor, *, silu: bool) -> Tensor:
    """See `Ops.silu_and_mul` and `Ops.gelu_and_mul`; contiguous."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (out.numel() // size, triton.cdiv(size, ACTIVATION_BLOCK))
    _gated[grid](gate_up, out, size, SILU=silu, BLOCK=ACTIVATION_BLOCK)
    return out


def _warps(size: int) -> int:
    """16 bytes a thread of 16-bit elements; between 1 and 8 warps."""
    return min(max(int(triton.next_power_of_2(size)) // 256, 1), 8)


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, x_stride, eps, size,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0)
    if ADD:
        x = x + tl.load(residual_ptr + row * size + offsets, mask=mask, other=0.0)
        tl.store(total_ptr + row * size + offsets, x, mask=mask)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 0) / size + eps)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    normed = (x32 * scale).to(x.dtype)
    tl.store(out_ptr + row * size + offsets, weight * normed, mask=mask)


@triton.jit
def _gated(x_ptr, out_ptr, size, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(x_ptr + row * 2 * size + offsets, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + offsets, activate(gate, SILU) * up, mask=mask)


@triton.jit
def activate(gate, SILU: tl.constexpr):
    """silu, or the tanh form of gelu, rounded to gate's dtype."""
    x = gate.to(tl.float32)
    if SILU:
        y = x / (1.0 + tl.exp(-x))
    else:
        # 0.5 * (1 + tanh(z)) = sigmoid(2z)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * z))
    return y.to(gate.dtype)
