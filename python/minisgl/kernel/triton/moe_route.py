"""The routing of a mixture: the weights and ids of each token's experts, in one launch.

Axes: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2

LOWEST = tl.constexpr(-3.0e38)
"""Logits below it, and NaN, count as equal to it. -inf marks experts that are taken."""


def route(
    logits_TE: Tensor, top_k: int, renormalise: bool, counts: Tensor | None = None,
    scale_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Ops.route`. counts: at most E int32, which are set to zero. scale_E: see `Experts`."""
    num_tokens, num_experts = logits_TE.shape
    weights_TK = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    ids_TK = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    if num_tokens:
        _launch_route(
            (num_tokens, 1, 1),
            (
                logits_TE, weights_TK, ids_TK, ids_TK if counts is None else counts,
                weights_TK if scale_E is None else scale_E,
            ),
            (
                num_experts, top_k, renormalise, scale_E is not None,
                0 if counts is None else len(counts), power_of_2(num_experts),
                power_of_2(top_k),
            ),
            dtype=logits_TE.dtype, num_warps=1,
        )  # fmt: skip
    return weights_TK, ids_TK


@triton.jit
def _route_kernel(
    logits_ptr, weights_ptr, ids_ptr, counts_ptr, scale_ptr,
    E: tl.constexpr, K: tl.constexpr, RENORMALISE: tl.constexpr, SCALED: tl.constexpr,
    COUNTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    begin(PDL)
    if COUNTS > 0:
        tl.store(counts_ptr + e, tl.zeros([BLOCK_E], tl.int32), mask=(e < COUNTS) & (t == 0))
    x = tl.load(logits_ptr + t * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    total = tl.sum(tl.exp(x - largest), 0)
    # Ids stay in range, each at most once, whatever the logits are.
    left = tl.where(e < E, tl.where(x > LOWEST, x, LOWEST), float("-inf"))
    weights = tl.zeros([BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        best = tl.argmax(left, 0)
        value = tl.sum(tl.where(e == best, x, 0.0), 0)
        weights = tl.where(k == i, tl.exp(value - largest) / total, weights)
        ids = tl.where(k == i, best, ids)
        left = tl.where(e == best, float("-inf"), left)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 0)
    if SCALED:
        weights *= tl.load(scale_ptr + ids, mask=k < K, other=0.0)
    tl.store(weights_ptr + t * K + k, weights, mask=k < K)
    tl.store(ids_ptr + t * K + k, ids, mask=k < K)


_launch_route = Launcher(_route_kernel)
