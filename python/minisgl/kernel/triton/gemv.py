"""Linear layers of a few rows, which read the weights once and do little else.

A program holds some outputs' whole weights in registers: it loads them before it waits for the
kernel that makes its input (see `minisgl.kernel.triton.launch`), so one layer's weights arrive
while the layer before still computes. The norm before and the activation behind a product are
done by the programs themselves, once each: at one row a kernel of its own costs more.

Axes: M rows, D inputs, F outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.elementwise import activate, normed
from minisgl.kernel.triton.launch import Launcher, begin, power_of_2

MAX_ROWS = 4
"""Above it cuBLAS, with its tensor cores; one row was measured, where the two part was not."""
MAX_WIDE_ROWS = 2  # the wide kernel keeps a sum per row, output and step
MAX_HELD = 4096
"""Inputs that fit registers whole; wider layers are read in steps."""
TILE_BYTES = 32 << 10
"""Weights that one program holds: two or three programs fill a multiprocessor."""
STEP = 1024  # inputs a step of the wide kernel


def reaches(num_rows: int, inputs: int) -> bool:
    """Whether these kernels are for such a product."""
    return num_rows <= (MAX_ROWS if inputs <= MAX_HELD else MAX_WIDE_ROWS)


def fuses(num_rows: int, inputs: int) -> bool:
    """Whether `norm_linear` is for such a product."""
    return num_rows <= MAX_ROWS and inputs <= MAX_HELD


def linear(x_MD: Tensor, weight_FD: Tensor, bias: Tensor | None) -> Tensor:
    """See `Ops.linear`."""
    outputs, inputs = weight_FD.shape
    if inputs <= MAX_HELD:
        return _held(x_MD, None, None, 0.0, weight_FD, bias)[0]
    out_MF = torch.empty((len(x_MD), outputs), dtype=x_MD.dtype, device=x_MD.device)
    block = (8 if outputs >= 8192 else 4) // len(x_MD)
    _launch_wide(
        (-(-outputs // block), 1, 1),
        (x_MD, weight_FD, weight_FD if bias is None else bias, out_MF),
        (outputs, inputs, len(x_MD), block, STEP, bias is not None),
        dtype=x_MD.dtype, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out_MF


def norm_linear(
    x_MD: Tensor,
    residual_MD: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight_FD: Tensor,
    bias: Tensor | None,
    *,
    silu: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(linear(norm(x + residual)), x + residual). silu: the linear layer is a gate and an up half,
    and what comes out is activation(gate) * up, with silu or gelu. At most MAX_HELD inputs."""
    return _held(x_MD, residual_MD, norm_weight, eps, weight_FD, bias, silu)


def _held(
    x_MD: Tensor,
    residual_MD: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    weight_FD: Tensor,
    bias: Tensor | None,
    silu: bool | None = None,
) -> tuple[Tensor, Tensor]:
    halves = 1 if silu is None else 2
    outputs, inputs = weight_FD.shape[0] // halves, weight_FD.shape[1]
    out_MF = torch.empty((len(x_MD), outputs), dtype=x_MD.dtype, device=x_MD.device)
    total_MD = x_MD if residual_MD is None else torch.empty_like(x_MD)
    width = power_of_2(inputs)
    held = TILE_BYTES // (width * weight_FD.itemsize * halves)
    block = max(min(held, power_of_2(outputs // 256)), 1)
    _launch_held(
        (-(-outputs // block), 1, 1),
        (
            x_MD, x_MD if residual_MD is None else residual_MD,
            x_MD if norm_weight is None else norm_weight,
            weight_FD, weight_FD if bias is None else bias, out_MF, total_MD, eps,
        ),
        (
            outputs, inputs, width, len(x_MD), block, residual_MD is not None,
            norm_weight is not None, bias is not None, silu is not None, bool(silu),
        ),
        dtype=x_MD.dtype, num_warps=4,
    )  # fmt: skip
    return out_MF, total_MD


@triton.jit
def _held_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, eps,
    F: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    f = first + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    in_d = d < D
    inside = (f[:, None] < F) & in_d[None, :]
    at = f[:, None].to(tl.int64) * D + d[None, :]
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    if GATED:
        up_weight = tl.load(weight_ptr + F * D + at, mask=inside, other=0.0)
    if NORM:
        norm_weight = tl.load(norm_ptr + d, mask=in_d, other=0.0)
    begin(PDL)
    for m in tl.static_range(M):
        x = tl.load(x_ptr + m * D + d, mask=in_d, other=0.0)
        if ADD:
            x = x + tl.load(residual_ptr + m * D + d, mask=in_d, other=0.0)
            if tl.program_id(0) == 0:
                tl.store(total_ptr + m * D + d, x, mask=in_d)
        if NORM:
            x = normed(x, norm_weight, eps, D)
        x32 = x.to(tl.float32)[None, :]
        y = tl.sum(weight.to(tl.float32) * x32, 1)
        if BIAS:
            y += tl.load(bias_ptr + f, mask=f < F, other=0.0).to(tl.float32)
        y = y.to(x.dtype)
        if GATED:
            up = tl.sum(up_weight.to(tl.float32) * x32, 1)
            if BIAS:
                up += tl.load(bias_ptr + F + f, mask=f < F, other=0.0).to(tl.float32)
            y = activate(y, SILU) * up.to(x.dtype)
        tl.store(out_ptr + m * F + f, y, mask=f < F)


@triton.jit
def _wide_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    F: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, M)
    row = weight_ptr + f[:, None].to(tl.int64) * D
    acc = tl.zeros([M, BLOCK, STEP], tl.float32)
    begin(PDL)
    for start in range(0, D, STEP):
        d = start + tl.arange(0, STEP)
        inside = (f[:, None] < F) & (d[None, :] < D)
        weight = tl.load(row + d[None, :], mask=inside, other=0.0)
        x = tl.load(x_ptr + m[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
        acc += weight.to(tl.float32)[None] * x.to(tl.float32)[:, None, :]
    y = tl.sum(acc, 2)
    if BIAS:
        y += tl.load(bias_ptr + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
    at = m[:, None] * F + f[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=f[None, :] < F)


_launch_held = Launcher(_held_kernel)
_launch_wide = Launcher(_wide_kernel)
