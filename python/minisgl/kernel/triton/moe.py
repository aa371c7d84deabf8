"""The experts of a mixture as grouped GEMMs (no token is dropped).

After routing (`moe_route`) the pairs of a token and an expert are grouped by expert, so that each
expert's weights are read once::

    place   pairs -> rows [L, T]: for each expert its pairs, as many as counts [L] says
    gemm    tiles of BLOCK_M pairs of one expert by BLOCK_N outputs: gate and up with their
            activation, then down with the routing weight
    total   the K results of each token

Nothing waits for the device and shapes follow from T alone, so all of it can be captured in a
graph. A tile finds its expert by a running sum over counts: tiles past the last one return. Pairs
are placed with atomic additions, in any order, which no result depends on: a pair's results are
computed in the same order wherever its row is in a tile, and `total` adds in order of K. Grouping
tokens into padded blocks of one expert is MegaBlocks' idea (Gale et al. 2022).

Axes: T tokens, L experts of this rank (from `first` on), K experts of a token, D hidden
size, F intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.elementwise import activate
from minisgl.kernel.triton.launch import Launcher, begin, power_of_2

PLACE_BLOCK = 256
"""A program places so many pairs, two for each thread of four warps."""
TOTAL_BLOCK = 1024
"""A program sums so many outputs, of which a thread of four warps then has 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a grouped GEMM is tiled: pairs, outputs and inputs of a tile, warps, stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The activation of an expert, as the kernels take it.

    alpha, limit: see `minisgl.moe.ClampedGate`; with limit 0 it is silu(gate) * up, or with is_gelu
    gelu(gate) * up. is_squared: it is relu(up) ** 2, without a gate.
    """

    is_gelu: bool = False
    is_squared: bool = False
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def constants(self) -> tuple[bool, float, float]:
        return self.is_gelu, self.alpha, self.limit


SILU = Gate()


Gemm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], None]
"""`grouped_gemm`, without its keywords."""


def experts(
    x_TD: Tensor, gate_up_LGD: Tensor, down_LDF: Tensor, weights_TK: Tensor, ids_TK: Tensor,
    first: int, counts_L: Tensor, *, up: Gemm, down: Gemm, down_bias_LD: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of each token's experts, [T, D]. counts_L: int32 zeros, see `place`.

    down_bias_LD: for a `down` that adds no biases.
    """
    (num_tokens, hidden), top_k = x_TD.shape, ids_TK.shape[1]
    num_held, _, inner = down_LDF.shape
    rows_LT = place(ids_TK, counts_L, first)
    act = torch.empty((num_tokens * top_k, inner), dtype=x_TD.dtype, device=x_TD.device)
    partial = torch.empty((num_tokens * top_k, hidden), dtype=x_TD.dtype, device=x_TD.device)
    up(x_TD, gate_up_LGD, counts_L, rows_LT, None, act)
    down(act, down_LDF, counts_L, rows_LT, weights_TK, partial)
    return total(partial, weights_TK, ids_TK, first, num_held, down_bias_LD)


def total(
    partial: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    first: int,
    num_held: int,
    bias_LD: Tensor | None = None,
) -> Tensor:
    """Return the sums [T, D], in order of K, of each token's pairs [T * K, D] whose experts are on
    this rank.

    bias_LD: an expert's bias, times a pair's weight, is added to each of its pairs.
    """
    (num_tokens, top_k), hidden = ids_TK.shape, partial.shape[1]
    out_TD = torch.empty((num_tokens, hidden), dtype=partial.dtype, device=partial.device)
    _launch_total(
        (num_tokens, -(-hidden // TOTAL_BLOCK), 1),
        (partial, ids_TK, weights_TK, partial if bias_LD is None else bias_LD, out_TD),
        (num_held, first, top_k, hidden, bias_LD is not None, TOTAL_BLOCK),
        dtype=partial.dtype, num_warps=4,
    )  # fmt: skip
    return out_TD


def place(ids_TK: Tensor, counts_L: Tensor, first: int) -> Tensor:
    """Return rows [L, T]: the pairs (token * K + k) of each expert. counts_L, int32 zeros, gets the
    number of each expert's pairs."""
    num_held, num_tokens = len(counts_L), len(ids_TK)
    rows_LT = torch.empty((num_held, num_tokens), dtype=torch.int32, device=ids_TK.device)
    _launch_place(
        (-(-ids_TK.numel() // PLACE_BLOCK), 1, 1),
        (ids_TK, counts_L, rows_LT, ids_TK.numel(), num_tokens),
        (num_held, first, PLACE_BLOCK), dtype=torch.int32, num_warps=4,
    )  # fmt: skip
    return rows_LT


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    counts_L: Tensor,
    rows_LT: Tensor,
    scales: Tensor | None,
    out: Tensor,
    tile: Tile,
    *,
    gate: Gate = SILU,
    bias: Tensor | None = None,
) -> None:
    """Write out [pairs, N]: x times the weight [L, N, K] of each pair's expert, times the pair's
    scale.

    x has a row for each pair, or for each token. Without scales weight is [L, 2N, K], gate then up,
    and `gate` is applied; for a squared `gate` weight is [L, N, K]. bias: added before the gate.
    """
    (num_held, num_tokens), (num_pairs, outputs) = rows_LT.shape, out.shape
    # Each expert's last tile may be short; none has more pairs than there are tokens.
    busy = min(num_held, num_pairs)
    num_tiles = min(num_pairs // tile.m + busy, busy * -(-num_tokens // tile.m))
    _launch_gemm(
        (num_tiles * -(-outputs // tile.n), 1, 1),
        (x, weight, counts_L, rows_LT, x if scales is None else scales, out,
         x if bias is None else bias, num_tokens),
        (
            num_held, num_pairs // len(x), outputs, x.shape[1],
            scales is None and not gate.is_squared, scales is None and gate.is_squared,
            bias is not None, *gate.constants, power_of_2(num_held), tile.m, tile.n, tile.k,
        ),
        dtype=x.dtype, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _place_kernel(
    ids_ptr, counts_ptr, rows_ptr, num_pairs, num_tokens,
    L: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    expert = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) - FIRST
    held = (pair < num_pairs) & (expert >= 0) & (expert < L)
    index = tl.atomic_add(counts_ptr + expert, 1, mask=held, sem="relaxed")
    tl.store(rows_ptr + expert.to(tl.int64) * num_tokens + index, pair, mask=held)


@triton.jit
def gated(
    gate, up, type: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Return the `Gate` of float32 sums, each step rounded as the reference rounds."""
    gate, up = gate.to(type).to(tl.float32), up.to(type).to(tl.float32)
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = (tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1).to(type).to(tl.float32)
        act = (1 / (1 + tl.exp(-(gate * ALPHA).to(type).to(tl.float32)))).to(type).to(tl.float32)
        act = (gate * act).to(type).to(tl.float32)
    else:
        act = activate(gate.to(type), not GELU).to(tl.float32)
    return (act * up).to(type)


@triton.jit
def squared(up, type: tl.constexpr):
    """Return the square of the ReLU of a float32 sum, rounded as the reference rounds."""
    up = tl.maximum(up.to(type).to(tl.float32), 0.0)
    return (up * up).to(type)


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_gemm(
    x_ptr, weight_ptr, counts_ptr, rows_ptr, scale_ptr, out_ptr, bias_ptr, num_tokens,
    L: tl.constexpr, SHARE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    SQUARED: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write out [pairs, N]: x [pairs / SHARE, K] times the expert's weight [N, K], times the
    scale.

    GATED: weight is [2N, K], gate then up; their rows alternate in a tile, so that a thread has
    both. The output is `gated`, without the scale. SQUARED: the output is `squared`, without the
    scale.
    """
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // BLOCKS
    first_n = tl.program_id(0) % BLOCKS * BLOCK_N
    lanes = tl.arange(0, BLOCK_L)
    begin(PDL)
    counts = tl.load(counts_ptr + lanes, mask=lanes < L, other=0)
    ends = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert >= L:
        return
    before = tl.max(tl.where(lanes < expert, ends, 0), 0)
    count = tl.sum(tl.where(lanes == expert, counts, 0), 0)
    m = (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < count
    pair = tl.load(rows_ptr + expert.to(tl.int64) * num_tokens + m, mask=inside, other=0)

    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (pair // SHARE).to(tl.int64)[:, None] * K + k[None, :]
    if GATED:
        column = tl.arange(0, 2 * BLOCK_N)
        n = tl.minimum(first_n + column // 2, N - 1) + column % 2 * N
        w_at = weight_ptr + expert.to(tl.int64) * 2 * N * K + n[None, :] * K + k[:, None]
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
    else:
        n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1)
        w_at = weight_ptr + expert.to(tl.int64) * N * K + n[None, :] * K + k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            x = tl.load(x_at + start, mask=k[None, :] < K - start, other=0.0)
            w = tl.load(w_at + start, mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:  # n are the rows of the weight here
        ROWS: tl.constexpr = 2 * N if GATED else N
        acc += tl.load(bias_ptr + expert.to(tl.int64) * ROWS + n).to(tl.float32)[None, :]
    type = out_ptr.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        out = gated(gate, up, type, GELU, ALPHA, LIMIT)
    elif SQUARED:
        out = squared(acc, type)
    else:
        scale = tl.load(scale_ptr + pair, mask=inside, other=0.0)
        out = (acc * scale[:, None]).to(type)
    n = first_n + tl.arange(0, BLOCK_N)
    at = pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, out, mask=inside[:, None] & (n[None, :] < N))


@triton.jit
def _total_kernel(
    partial_ptr, ids_ptr, scale_ptr, bias_ptr, out_ptr,
    L: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    begin(PDL)
    for i in tl.static_range(K):
        expert = tl.load(ids_ptr + t * K + i) - FIRST
        held = (expert >= 0) & (expert < L)
        part = tl.load(partial_ptr + (t * K + i) * D + d, mask=held & (d < D), other=0.0)
        acc += part.to(tl.float32)
        if BIAS:
            at = bias_ptr + expert.to(tl.int64) * D + d
            bias = tl.load(at, mask=held & (d < D), other=0.0).to(tl.float32)
            acc += bias * tl.load(scale_ptr + t * K + i)
    tl.store(out_ptr + t * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


_launch_place = Launcher(_place_kernel)
_launch_gemm = Launcher(_grouped_gemm)
_launch_total = Launcher(_total_kernel)
