"""The experts of a mixture for few tokens: GEMVs that read an expert's weights once per token.

A program computes some outputs of a (token, expert) pair, or, for down, of a token.

Axes: T tokens, K experts of a token, L experts of this rank (from `first` on), D hidden size, F
intermediate size of an expert, G = 2F.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl.kernel.triton.moe import SILU, Gate, gated, squared


def experts_of_few(
    x_TD: Tensor,
    gate_up_LGD: Tensor,
    down_LDF: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    first: int,
    *,
    gate: Gate = SILU,
    up_bias_LG: Tensor | None = None,
    down_bias_LD: Tensor | None = None,
    blocks: tuple[int, int] = (4, 4),
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, D]. blocks: outputs of a program, of
    gate and up, and of down. up_bias_LG: of gate, then up."""
    (num_tokens, hidden), top_k = x_TD.shape, ids_TK.shape[1]
    num_held, _, inner = down_LDF.shape
    act = torch.empty((num_tokens * top_k, inner), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    constants = (num_held, first, top_k, hidden, inner)
    _launch_up(
        (-(-inner // blocks[0]), num_tokens * top_k, 1),
        (x_TD, gate_up_LGD, ids_TK, act, act if up_bias_LG is None else up_bias_LG),
        (
            *constants, gate.is_squared, up_bias_LG is not None, *gate.constants, blocks[0],
            _step(hidden),
        ),
        dtype=x_TD.dtype, num_warps=4,
    )  # fmt: skip
    _launch_down(
        (-(-hidden // blocks[1]), num_tokens, 1),
        (
            act, down_LDF, ids_TK, weights_TK, out_TD,
            act if down_bias_LD is None else down_bias_LD,
        ),
        (*constants, down_bias_LD is not None, blocks[1], _step(inner)),
        dtype=x_TD.dtype, num_warps=4,
    )  # fmt: skip
    return out_TD


def _step(size: int) -> int:
    """Inputs of an iteration. More iterations cost more than lanes without inputs."""
    return min(power_of_2(size), 1024)


@triton.jit
def _up_kernel(
    x_ptr, weight_ptr, ids_ptr, act_ptr, bias_ptr,
    L: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    SQUARED: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.program_id(1)
    begin(PDL)
    expert = tl.load(ids_ptr + pair) - FIRST
    if (expert < 0) | (expert >= L):
        return
    ROWS: tl.constexpr = F if SQUARED else 2 * F
    row = weight_ptr + expert.to(tl.int64) * ROWS * D + f[:, None] * D
    gate = tl.zeros([BLOCK, STEP], tl.float32)
    up = tl.zeros([BLOCK, STEP], tl.float32)
    for start in tl.static_range(0, D, STEP):
        d = start + tl.arange(0, STEP)
        inside = (f[:, None] < F) & (d[None, :] < D)
        x = tl.load(x_ptr + (pair // K) * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(row + d[None, :], mask=inside, other=0.0).to(tl.float32) * x
        if not SQUARED:
            up += tl.load(row + F * D + d[None, :], mask=inside, other=0.0).to(tl.float32) * x
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if BIAS:
        bias = bias_ptr + expert.to(tl.int64) * 2 * F + f
        gate_sum += tl.load(bias, mask=f < F, other=0.0).to(tl.float32)
        up_sum += tl.load(bias + F, mask=f < F, other=0.0).to(tl.float32)
    if SQUARED:  # the first rows are those of up
        act = squared(gate_sum, act_ptr.dtype.element_ty)
    else:
        act = gated(gate_sum, up_sum, act_ptr.dtype.element_ty, GELU, ALPHA, LIMIT)
    tl.store(act_ptr + pair.to(tl.int64) * F + f, act, mask=f < F)


@triton.jit
def _down_kernel(
    act_ptr, weight_ptr, ids_ptr, scale_ptr, out_ptr, bias_ptr,
    L: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1)
    acc = tl.zeros([BLOCK, STEP], tl.float32)
    biases = tl.zeros([BLOCK], tl.float32)
    begin(PDL)
    for i in tl.static_range(K):
        expert = tl.load(ids_ptr + t * K + i) - FIRST
        held = (expert >= 0) & (expert < L)
        scale = tl.load(scale_ptr + t * K + i)
        if BIAS:
            at = bias_ptr + expert.to(tl.int64) * D + d
            biases += tl.load(at, mask=held & (d < D), other=0.0).to(tl.float32) * scale
        row = weight_ptr + (expert.to(tl.int64) * D + d[:, None]) * F
        for start in tl.static_range(0, F, STEP):
            f = start + tl.arange(0, STEP)
            act = tl.load(act_ptr + (t * K + i) * F + f, mask=held & (f < F), other=0.0)
            inside = held & (d[:, None] < D) & (f[None, :] < F)
            weight = tl.load(row + f[None, :], mask=inside, other=0.0)
            acc += weight.to(tl.float32) * (act.to(tl.float32) * scale)[None, :]
    tl.store(
        out_ptr + t * D + d, (tl.sum(acc, 1) + biases).to(out_ptr.dtype.element_ty), mask=d < D
    )


_launch_up = Launcher(_up_kernel)
_launch_down = Launcher(_down_kernel)
