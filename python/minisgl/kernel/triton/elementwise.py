"""Norms and gated activations: each is one pass over memory, with the reference's rounding.

Axes: M rows, D their size, F intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2

ACTIVATION_BLOCK = 1024
"""A program of four warps then loads 16 bytes a thread of each 16-bit input."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`; the last axis of x is contiguous."""
    size = x.shape[-1]
    x_MD = x.reshape(-1, size)
    if x_MD.data_ptr() % 16:  # a part of one row: the launcher promises Triton aligned addresses
        x_MD = x_MD.clone()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    constants = (x_MD.stride(0), size, power_of_2(size), False)
    _launch_norm(
        (len(x_MD), 1, 1), (x_MD, x_MD, weight, out, out, eps), constants,
        dtype=(x.dtype, weight.dtype), num_warps=warps_of(size),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Ops.add_rms_norm`; both arguments are contiguous."""
    size = x.shape[-1]
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(
        (x.numel() // size, 1, 1), (x, residual, weight, out, total, eps),
        (size, size, power_of_2(size), True),
        dtype=(x.dtype, weight.dtype), num_warps=warps_of(size),
    )  # fmt: skip
    return out, total


def gated(gate_up: Tensor, *, silu: bool) -> Tensor:
    """See `Ops.gated`. gate_up is contiguous."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (out.numel() // size, -(-size // ACTIVATION_BLOCK), 1)
    constants = (size, silu, ACTIVATION_BLOCK)
    _launch_gated(grid, (gate_up, out), constants, dtype=gate_up.dtype, num_warps=4)
    return out


def warps_of(size: int) -> int:
    """Return the number of warps, 1 to 8, of a program that has a row of `size`. A thread has 16
    bytes of 16-bit elements."""
    return min(max(power_of_2(size) // 256, 1), 8)


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps,
    X_STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    begin(PDL)
    x = tl.load(x_ptr + row * X_STRIDE + offsets, mask=mask, other=0.0)
    if ADD:
        x = x + tl.load(residual_ptr + row * SIZE + offsets, mask=mask, other=0.0)
        tl.store(total_ptr + row * SIZE + offsets, x, mask=mask)
    tl.store(out_ptr + row * SIZE + offsets, normed(x, weight, eps, SIZE), mask=mask)


@triton.jit
def normed(x, weight, eps, SIZE: tl.constexpr):
    """Return the RMS norm of x [BLOCK], times weight. x is 0 past SIZE."""
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 0) / SIZE + eps)
    return (x32 * scale * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _gated(
    x_ptr, out_ptr, SIZE: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    begin(PDL)
    gate = tl.load(x_ptr + row * 2 * SIZE + offsets, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + row * SIZE + offsets, activate(gate, SILU) * up, mask=mask)


@triton.jit
def activate(gate, SILU: tl.constexpr):
    """Return silu, or the tanh form of gelu, of gate, rounded to its dtype."""
    x = gate.to(tl.float32)
    if SILU:
        y = x / (1.0 + tl.exp(-x))
    else:
        # 0.5 * (1 + tanh(z)) = sigmoid(2z)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * z))
    return y.to(gate.dtype)


_launch_norm = Launcher(_rms_norm)
_launch_gated = Launcher(_gated)
