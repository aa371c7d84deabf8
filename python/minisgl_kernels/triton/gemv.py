"""GEMVs: linear layers of one or two rows, whose time is that of reading the weights.

A program holds all weights of some outputs in registers. It loads them before it waits for the
kernel that computes its input (see `minisgl.kernel.triton.launch`), so the weights of one layer
arrive while the layer before still computes. Each program also computes the norm before the GEMV,
and the activation of its outputs: with one row, separate kernels for these would take longer.

Axes: M rows, D inputs, F outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl.kernel.triton.elementwise import activate
from minisgl.kernel.triton.launch import Launcher, begin, power_of_2

MAX_INPUTS_OF_2 = 3072
"""The most inputs with two rows. cuBLAS computes GEMMs of more inputs or more rows. A step of
Qwen3-0.6B takes 0.85 ms here and 1.22 with cuBLAS with 2 rows, 1.28 and 1.21 with 3 rows; a quarter
of 32B takes 6.9 and 5.6 with 2 rows."""
MAX_INPUTS = 32768
"""The most inputs. A multiprocessor's registers hold two rows of so many numbers in bfloat16."""
TILE_BYTES = 48 << 10
"""The most bytes of weights that one program holds. A step of Qwen3-14B with one row takes 7.46 ms
with 24 KB, 7.47 with 32, 7.01 with 48 and 64."""


def takes(num_rows: int, inputs: int) -> bool:
    """Return whether these kernels compute such a GEMM. num_rows: 0 in a step in which no row
    samples; then there is nothing to launch."""
    return 0 < num_rows <= 2 and inputs <= (MAX_INPUTS if num_rows == 1 else MAX_INPUTS_OF_2)


def norm_linear(
    x_MD: Tensor,
    residual_MD: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    weight_FD: Tensor,
    bias: Tensor | None,
    gate: Activation | None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Ops.norm_linear`. At most MAX_INPUTS inputs. out_dtype: of the output; None for that of
    x, the only one with a gate."""
    halves = 2 if gate else 1
    outputs, inputs = weight_FD.shape[0] // halves, weight_FD.shape[1]
    out_dtype = out_dtype or x_MD.dtype
    out_MF = torch.empty((len(x_MD), outputs), dtype=out_dtype, device=x_MD.device)
    total_MD = x_MD if residual_MD is None else torch.empty_like(x_MD)
    # A tile's width is a power of two: 5,120 inputs are 4,096 and 1,024.
    width = power_of_2(inputs + 1) // 2
    rest = power_of_2(inputs - width) if inputs > width else 0
    row_bytes = (width + rest) * weight_FD.itemsize * halves
    block = max(min(power_of_2(TILE_BYTES // row_bytes + 1) // 2, power_of_2(outputs // 256)), 1)
    _launch_held(
        (-(-outputs // block), 1, 1),
        (
            x_MD, x_MD if residual_MD is None else residual_MD,
            x_MD if norm_weight is None else norm_weight,
            weight_FD, weight_FD if bias is None else bias, out_MF, total_MD, eps,
        ),
        (
            outputs, inputs, width, rest, len(x_MD), block, residual_MD is not None,
            norm_weight is not None, bias is not None, bool(gate), gate == "silu",
        ),
        dtype=(x_MD.dtype, None if norm_weight is None else norm_weight.dtype, out_dtype),
        num_warps=4 if row_bytes <= 32 << 10 else 8,
    )  # fmt: skip
    return out_MF, total_MD


@triton.jit
def _held_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, eps,
    F: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = weight_ptr + f[:, None].to(tl.int64) * D
    in_f = f < F
    # a: inputs [0, WIDTH). b: inputs [WIDTH, D), if there are any.
    a = tl.arange(0, WIDTH)
    b = WIDTH + tl.arange(0, max(REST, 1))
    in_b = b < D
    weight_a = tl.load(row + a[None, :], mask=in_f[:, None], other=0.0)
    if REST:
        in_fb = in_f[:, None] & in_b[None, :]
        weight_b = tl.load(row + b[None, :], mask=in_fb, other=0.0)
    if GATED:
        up_a = tl.load(row + F * D + a[None, :], mask=in_f[:, None], other=0.0)
        if REST:
            up_b = tl.load(row + F * D + b[None, :], mask=in_fb, other=0.0)
    if NORM:
        norm_a = tl.load(norm_ptr + a)
        if REST:
            norm_b = tl.load(norm_ptr + b, mask=in_b, other=0.0)
    begin(PDL)
    for m in tl.static_range(M):
        x_a = tl.load(x_ptr + m * D + a)
        if REST:
            x_b = tl.load(x_ptr + m * D + b, mask=in_b, other=0.0)
        if ADD:
            x_a = x_a + tl.load(residual_ptr + m * D + a)
            if REST:
                x_b = x_b + tl.load(residual_ptr + m * D + b, mask=in_b, other=0.0)
            if tl.program_id(0) == 0:
                tl.store(total_ptr + m * D + a, x_a)
                if REST:
                    tl.store(total_ptr + m * D + b, x_b, mask=in_b)
        if NORM:
            square = tl.sum(x_a.to(tl.float32) * x_a.to(tl.float32), 0)
            if REST:
                square += tl.sum(x_b.to(tl.float32) * x_b.to(tl.float32), 0)
            # It multiplies the sums below, so they do not wait for it.
            scale = tl.rsqrt(square / D + eps)
            x_a = x_a.to(tl.float32) * norm_a.to(tl.float32)
            if REST:
                x_b = x_b.to(tl.float32) * norm_b.to(tl.float32)
        y = _dot(weight_a, x_a)
        if REST:
            y += _dot(weight_b, x_b)
        if NORM:
            y *= scale
        if BIAS:
            y += tl.load(bias_ptr + f, mask=in_f, other=0.0).to(tl.float32)
        y = y.to(out_ptr.dtype.element_ty)
        if GATED:
            up = _dot(up_a, x_a)
            if REST:
                up += _dot(up_b, x_b)
            if NORM:
                up *= scale
            if BIAS:
                up += tl.load(bias_ptr + F + f, mask=in_f, other=0.0).to(tl.float32)
            y = activate(y, SILU) * up.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + m * F + f, y, mask=in_f)


@triton.jit
def _dot(weight, x):
    """Return weight [BLOCK, X] @ x [X], in float32."""
    return tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], 1)


_launch_held = Launcher(_held_kernel)
