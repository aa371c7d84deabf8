"""The gates of hybrids' layers: one launch each, rounded as `minisgl_zoo.recurrent.gates` rounds.

Arithmetic is float32 with a conversion at each rounding, so the compiler cannot fuse across one.

Axes: T tokens, N heads, H head dim, V value dim, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl.quantization import Weight
from minisgl_zoo.recurrent.gates import Gates

BLOCK = 1024  # 16 bytes a thread of 16-bit elements
DELTA_BLOCK = 256
FEW_ROWS = 4096  # of a norm: about the warps that a large GPU runs at once
NORM_BLOCK = 2048  # elements of a program where there are more rows


class TritonGates(Gates):
    """As `Gates`, for a GPU."""

    def delta(self, ba: Tensor, a_log_N: Tensor, dt_bias_N: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens, num_heads = len(ba), len(a_log_N)
        g_TN, beta_TN = (
            torch.empty((num_tokens, num_heads), dtype=torch.float32, device=ba.device)
            for _ in range(2)
        )
        total = num_tokens * num_heads
        _launch_delta(
            (-(-total // DELTA_BLOCK), 1, 1), (ba, a_log_N, dt_bias_N, g_TN, beta_TN, total),
            (ba.stride(0), num_heads, DELTA_BLOCK), dtype=ba.dtype, num_warps=4,
        )  # fmt: skip
        return g_TN, beta_TN

    def norm(self, x_TNV: Tensor, weight_V: Tensor, eps: float, z: Tensor) -> Tensor:
        num_tokens, num_heads, size = x_TNV.shape
        out = torch.empty((num_tokens, num_heads * size), dtype=x_TNV.dtype, device=x_TNV.device)
        total, block = num_tokens * num_heads, power_of_2(size)
        rows = 1 if total <= FEW_ROWS else max(NORM_BLOCK // block, 1)
        _launch_norm(
            (-(-total // rows), 1, 1), (x_TNV.contiguous(), weight_V, z, out, total, eps),
            (z.stride(0), num_heads, size, rows, block),
            dtype=x_TNV.dtype, num_warps=min(max(rows * block // 512, 1), 8),
        )  # fmt: skip
        return out

    def output(self, x: Tensor, gate_TNG: Tensor) -> Tensor:
        num_tokens, size = x.shape
        num_heads, is_of_head = gate_TNG.shape[1], gate_TNG.shape[2] == 1
        gate_TNH = (
            gate_TNG.expand(-1, -1, size // num_heads).contiguous() if is_of_head else gate_TNG
        )
        out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
        _launch_output(
            (num_tokens, -(-size // BLOCK), 1), (x, gate_TNH, out),
            (x.stride(0), *gate_TNH.stride()[:2], gate_TNH.shape[2], size, BLOCK),
            dtype=x.dtype, num_warps=4,
        )  # fmt: skip
        return out


def add_gated(x_TD: Tensor, h_TD: Tensor, gate: Weight, y_TD: Tensor) -> Tensor:
    """As `minisgl.layers.moe.add_gated`, for a GPU."""
    num_tokens, size = x_TD.shape
    out_TD = torch.empty((num_tokens, size), dtype=x_TD.dtype, device=x_TD.device)
    block = power_of_2(size)
    _launch_add(
        (num_tokens, 1, 1), (x_TD, h_TD, gate.dense(), y_TD, out_TD),
        (x_TD.stride(0), h_TD.stride(0), y_TD.stride(0), size, block),
        dtype=x_TD.dtype, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip
    return out_TD


@triton.jit
def _sigmoid(x):
    """Return the sigmoid of float32 numbers."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Return the softplus of float32 numbers as torch does: x itself above 20.

    log(1 + u) loses the digits of a small u. u * log(w) / (w - 1) with w = 1 + u has them: the
    errors of log(w) and of w - 1 cancel (Higham, Accuracy and Stability, section 1.14.1).
    """
    u = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + u
    is_tiny = w == 1.0
    log1p = tl.where(is_tiny, u, u * tl.log(w) / tl.where(is_tiny, 1.0, w - 1.0))
    return tl.where(x > 20.0, x, log1p)


@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=["ba_ptr"])
def _delta(
    ba_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, total,
    STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < total
    token, head = offsets // N, offsets % N
    rate = -tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head)
    begin(PDL)
    b = tl.load(ba_ptr + token * STRIDE + head, mask=mask, other=0.0)
    a = tl.load(ba_ptr + token * STRIDE + N + head, mask=mask, other=0.0)
    tl.store(g_ptr + offsets, rate * _softplus(a.to(tl.float32) + bias), mask=mask)
    beta = _sigmoid(b.to(tl.float32)).to(b.dtype)
    tl.store(beta_ptr + offsets, beta.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["total"])
def _norm(
    x_ptr, weight_ptr, z_ptr, out_ptr, total, eps,
    Z_STRIDE: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < total) & (column < SIZE)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    begin(PDL)
    x = tl.load(x_ptr + row * SIZE + column, mask=mask, other=0.0)
    z_row = z_ptr + row // N * Z_STRIDE + row % N * SIZE
    z = tl.load(z_row + column, mask=mask, other=0.0).to(tl.float32)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 1) / SIZE + eps)[:, None]
    normed = (x32 * scale * weight).to(x.dtype).to(tl.float32)
    y = normed * (z / (1.0 + tl.exp(-z)))
    tl.store(out_ptr + row * SIZE + column, y.to(x.dtype), mask=mask)


@triton.jit
def _add(
    x_ptr, h_ptr, weight_ptr, y_ptr, out_ptr,
    X_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    begin(PDL)
    h = tl.load(h_ptr + token * H_STRIDE + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sum(h * weight, 0).to(out_ptr.dtype.element_ty)
    x = tl.load(x_ptr + token * X_STRIDE + offsets, mask=mask, other=0.0)
    y = tl.load(y_ptr + token * Y_STRIDE + offsets, mask=mask, other=0.0)
    share = _sigmoid(gate.to(tl.float32)).to(x.dtype).to(tl.float32)
    added = (share * y.to(tl.float32)).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + token * SIZE + offsets, (x.to(tl.float32) + added).to(x.dtype), mask=mask)


@triton.jit
def _output(
    x_ptr, gate_ptr, out_ptr,
    X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    gate_row = gate_ptr + token * GATE_STRIDE + offsets // H * HEAD_STRIDE
    begin(PDL)
    gate = tl.load(gate_row + offsets % H, mask=mask, other=0.0)
    x = tl.load(x_ptr + token * X_STRIDE + offsets, mask=mask, other=0.0)
    share = _sigmoid(gate.to(tl.float32)).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + token * SIZE + offsets, (x.to(tl.float32) * share).to(x.dtype), mask=mask)


_launch_delta = Launcher(_delta)
_launch_norm = Launcher(_norm)
_launch_add = Launcher(_add)
_launch_output = Launcher(_output)
