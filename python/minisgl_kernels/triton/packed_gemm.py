"""GEMMs of few rows by packed weights, of one matrix or of a mixture's experts.

A program decodes tiles of the weights and multiplies them by the activations on tensor cores, with
the weights as the left operand: 64 outputs fill a matrix instruction, and rows are padded to 16.
The sum of each group of inputs is multiplied by its scale in float32. If there are too few tiles of
outputs for the device, several programs share the inputs of one. The last of them to end adds up
the partial sums of all, in the order of the programs, so the result is the same whichever ends
last.

Axes: M rows (or pairs of a token and an expert), F outputs, D inputs, L experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl_kernels.triton.packed import as_float, constants_of, decode
from minisgl_zoo.weights.quantised import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """m, n, k: rows, outputs and inputs of a tile. split: the programs that share its inputs."""

    m: int
    n: int
    k: int
    split: int = 1
    warps: int = 4
    stages: int = 3


def packed_gemm(
    x_MD: Tensor,
    weight: Packed,
    bias: Tensor | None,
    tile: TileConfig,
    done: Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x @ weight.T + bias. done: int32 zeros, one for each tile; zeros again afterwards.
    out_dtype: None for that of x."""
    rows, inputs = x_MD.shape
    outputs = weight.shape[-2]
    out_dtype = out_dtype or x_MD.dtype
    out_MF = torch.empty((rows, outputs), dtype=out_dtype, device=x_MD.device)
    tiles_m = -(-rows // tile.m)
    shape = (tile.split, rows, outputs) if tile.split > 1 else (1,)
    partial = torch.empty(shape, dtype=torch.float32, device=x_MD.device)
    assert tile.split == 1 or done is not None
    _launch(
        (-(-outputs // tile.n), tiles_m, tile.split),
        (
            x_MD, *weight.tensors, x_MD if bias is None else bias, out_MF, partial,
            partial if done is None else done, rows, partial, partial,
        ),
        (
            0, 1, outputs, inputs, 1, tile.m, tile.n, tile.k, tile.split, bias is not None,
            *constants_of(weight),
        ),
        dtype=(x_MD.dtype, *weight.key, out_dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_MF


def expert_gemm(
    x: Tensor,
    weight: Packed,
    counts_L: Tensor,
    rows_LT: Tensor,
    scales: Tensor | None,
    out: Tensor,
    tile: TileConfig,
) -> None:
    """Write out [pairs, F]: x times the weight [L, F, D] of each pair's expert, times the pair's
    scale.

    Differs from `minisgl.kernel.triton.moe.grouped_gemm` without scales: here out is [pairs, F].
    """
    (num_held, num_tokens), (num_pairs, outputs) = rows_LT.shape, out.shape
    busy = min(num_held, num_pairs)
    num_tiles = min(num_pairs // tile.m + busy, busy * -(-num_tokens // tile.m))
    _launch(
        (-(-outputs // tile.n), num_tiles, 1),
        (
            x, *weight.tensors, x if scales is None else scales, out, out, out, num_tokens,
            counts_L, rows_LT,
        ),
        (
            num_held, num_pairs // len(x), outputs, x.shape[1], power_of_2(num_held), tile.m,
            tile.n, tile.k, 1, scales is not None, *constants_of(weight),
        ),
        dtype=(x.dtype, *weight.key), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def find_pairs(
    counts_ptr, rows_ptr, num_tokens, tile, L: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return (the tile's expert, or L if none; its pairs [BLOCK_M]; which of these exist)."""
    lanes = tl.arange(0, BLOCK_L)
    counts = tl.load(counts_ptr + lanes, mask=lanes < L, other=0)
    ends = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(lanes < expert, ends, 0), 0)
    count = tl.sum(tl.where(lanes == expert, counts, 0), 0)
    m = (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (m < count) & (expert < L)
    pair = tl.load(rows_ptr + expert.to(tl.int64) * num_tokens + m, mask=inside, other=0)
    return expert, pair, inside


@triton.jit(do_not_specialize=["M"])
def _packed_gemm(
    x_ptr, numbers_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, M,
    counts_ptr, rows_ptr,
    L: tl.constexpr, SHARE: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    MIDDLE: tl.constexpr, EXPONENT: tl.constexpr, OUTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """L > 0: M is the number of tokens, and bias holds the scales of the pairs."""
    type: tl.constexpr = x_ptr.dtype.element_ty
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP if GROUP > 0 else 1
    SCALED: tl.constexpr = (GROUP > 0) & (KIND != 4)
    STEPS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    EACH: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < F
    begin(PDL)
    if L > 0:
        expert, pair, in_m = find_pairs(
            counts_ptr, rows_ptr, M, tl.program_id(1), L, BLOCK_L, BLOCK_M
        )
        if expert >= L:
            return
        row = expert.to(tl.int64) * F + n
        scale_row = expert.to(tl.int64) * (F // ROWS) + n // ROWS
        x_row = (pair // SHARE).to(tl.int64)
    else:
        pair = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        in_m = pair < M
        row = n.to(tl.int64)
        scale_row = n.to(tl.int64) // ROWS
        x_row = pair.to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    part = tl.program_id(2)
    for step in range(part * EACH, min((part + 1) * EACH, STEPS)):
        first = step * BLOCK_K
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + x_row[None, :] * D + k[:, None], mask=in_m[None, :] & (k[:, None] < D),
            other=0.0,
        )  # fmt: skip
        weight = decode(
            numbers_ptr, scale_ptr, zero_ptr, row, in_n, first, D, BLOCK_N, BLOCK_K, KIND, GROUP,
            ROWS, MIDDLE, EXPONENT, type,
        )  # fmt: skip
        if SCALED:
            at = scale_row * GROUPS + first // GROUP
            scale = as_float(tl.load(scale_ptr + at, mask=in_n, other=0.0), EXPONENT)
            acc += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
        else:
            acc = tl.dot(weight, x, acc, input_precision="ieee")
    at = pair.to(tl.int64)[None, :] * F + n[:, None]
    inside = in_n[:, None] & in_m[None, :]
    if SPLIT > 1:
        tl.store(partial_ptr + part.to(tl.int64) * M * F + at, acc, mask=inside)
        tl.debug_barrier()
        done = done_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(done, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(done, 0)
        tl.debug_barrier()
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in tl.static_range(SPLIT):
            acc += tl.load(partial_ptr + other * M.to(tl.int64) * F + at, mask=inside, other=0.0)
    if OUTER:
        acc *= tl.load(outer_ptr + row, mask=in_n, other=0.0)[:, None]
    if BIAS:
        if L > 0:
            acc *= tl.load(bias_ptr + pair, mask=in_m, other=0.0)[None, :]
        else:
            acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


_launch = Launcher(_packed_gemm)
