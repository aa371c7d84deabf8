"""Merges the partial sums of a row's KV splits, including the splits of the common prefix
(Flash-Decoding, Dao et al. 2023).

Axes: K key/value heads, G query heads per key/value head, V dims of a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernel.triton.launch import power_of_2

MERGED = 4096
"""Numbers that a merge loads in one iteration. With twice as many, short contexts lose more than
long ones gain (`attention_us` in benchmarks/results/h200-experiments.json)."""
MOST_MERGED = 16
"""The most splits that a merge loads at once. With more, compiling takes much longer."""


def merge_sizes(group: int, block_h: int, merged: int = MERGED) -> tuple[int, int]:
    """Return (MERGE_G, MERGE_P) of `merge`. merged: see `MERGED`."""
    merge_g = max(power_of_2(group), 2)
    return merge_g, min(max(merged // (merge_g * block_h), 1), MOST_MERGED)


@triton.jit
def prefix_split_size(prefix, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the keys of each split of a common prefix of `prefix` tokens."""
    return tl.maximum(tl.cdiv(tl.cdiv(prefix, SPLITS), BLOCK_N) * BLOCK_N, BLOCK_N)


@triton.jit
def merge(
    out_ptr, partial_ptr, mass_ptr, prefix_ptr, row, kv_head, base, count,
    K: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr, CASCADE: tl.constexpr,
    MERGE_G: tl.constexpr, MERGE_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Merge the partial sums of a row for the G heads, and store the result.

    The splits are `count` from `base` on, and those of the common prefix.
    """
    g = tl.arange(0, MERGE_G)
    h = tl.arange(0, BLOCK_H)
    head = kv_head * G + g
    num, beyond = count, base
    if CASCADE:
        prefix = tl.load(prefix_ptr)
        num += tl.cdiv(prefix, prefix_split_size(prefix, PREFIX_SPLITS, BLOCK_N))
        beyond = tl.num_programs(1) + row * PREFIX_SPLITS - count
    top = tl.full([MERGE_G], -1e30, tl.float32)
    mass = tl.zeros([MERGE_G], tl.float32)
    acc = tl.zeros([MERGE_G, BLOCK_H], tl.float32)
    for start in range(0, num, MERGE_P):
        for j in tl.static_range(MERGE_P):
            i = start + j
            there = (g < G) & (i < num)
            at = tl.where(i < count, base + i, beyond + i).to(tl.int64) * K * G + head
            log_mass = tl.load(mass_ptr + at, mask=there, other=-float("inf"))
            partial = tl.load(
                partial_ptr + at[:, None] * BLOCK_H + h[None, :], mask=there[:, None], other=0.0
            )
            new_top = tl.maximum(top, log_mass)
            shrink, weight = tl.exp2(top - new_top), tl.exp2(log_mass - new_top)
            acc = acc * shrink[:, None] + partial * weight[:, None]
            mass = mass * shrink + weight
            top = new_top
    at = (row.to(tl.int64) * K * G + head[:, None]) * V + h[None, :]
    out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=(g[:, None] < G) & (h[None, :] < V))
