"""The inner loop of decode and extend attention: queries attend to some keys of the paged cache,
with an online softmax (FlashAttention, Dao et al. 2022).

Attention to latents has one key for all heads, and its first V dims are its value. The tile of
these dims is read once; the other dims are a tile of their own (`q_rest`).

Axes: Z tokens of a page, K key/value heads, H head dim, V dims of a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernel.triton.launch import power_of_2
from minisgl.kernel.triton.pairs import (
    WEIGHT,
    as_float16,
    join_pairs,
    split_pairs,
    takes_pairs,
    unpacked,
)
from minisgl.kernel.triton.quantised import FP8, INT8

LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are scaled by it, as exp2 is what the hardware has."""

# Which of a block's keys a query sees.
WHOLE = tl.constexpr(0)  # all
ENDED = tl.constexpr(1)  # those before `end`
CAUSAL = tl.constexpr(2)  # those before its own `key_end`


def block_h_of(head_dim: int) -> int:
    """Return the width of a head in a tile: a power of two, at least 16, as `tl.dot` requires."""
    return max(power_of_2(head_dim), 16)


@triton.constexpr_function
def rest_block(head_dim, value_dim):
    """Return `block_h_of` of the dims of a key that no value has."""
    return max(1 << (head_dim - value_dim - 1).bit_length(), 16)


def scaled(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the kernels' (scale, SOFTCAP), for scores in base 2.

    scale multiplies q @ k. SOFTCAP multiplies tanh of the result; it is 0 without a softcap.
    """
    if softcap is None:
        return scale * LOG2_E.value, 0.0
    return scale / softcap, softcap * LOG2_E.value


@triton.jit
def tanh(x):
    """Return tanh(x). Near 0 it uses the polynomial of Cephes' tanhf (Moshier), because there the
    difference would lose digits."""
    z = x * x
    p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z) + 1.33314422036e-1
    near = (p * z - 3.33332819422e-1) * z * x + x
    return tl.where(z < 0.390625, near, 1.0 - 2.0 / (tl.exp(x + x) + 1.0))


@triton.jit
def no_keys(sinks_ptr, head, inside, SINKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return (sum of weights, largest score) [BLOCK] before any key.

    With SINKS these are 1 and the sink of the query's head, else 0 and a very small score.
    """
    mass = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], -1e30, tl.float32)  # finite: a window can hide a whole block
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0) * LOG2_E
        mass = tl.where(inside, 1.0, mass)
        top = tl.where(inside, sink, top)
    return mass, top


@triton.jit
def rest_of(q, q_ptr, at, inside, H: tl.constexpr, V: tl.constexpr):
    """Return the dims of queries [BLOCK, ...] after the first V; q if there are none.

    at: where each query begins [BLOCK].
    """
    if V < H:
        r = tl.arange(0, rest_block(H, V))
        there = inside[:, None] & (r[None, :] < H - V)
        q = tl.load(q_ptr + at[:, None] + V + r[None, :], mask=there, other=0.0)
    return q


@triton.jit
def attend(
    acc, mass, top, q, q_rest, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, query, key_end, h,
    kv_head, scale, window, first, last, end,
    MASK: tl.constexpr, Z: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    KV: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (sums of values, sums of weights, largest score) of the queries.

    They are acc, mass and top with keys [first, last) added; keys from `end` on do not exist.
    key_end: where the keys of each query end, with CAUSAL [BLOCK].
    q_rest: see `rest_of`. scale, SOFTCAP: see `scaled`. KV: the kind of pool; with FP8 the caller
    multiplies the sums of values at the end, by `times_value_scale`.
    """
    # Pairs of 8-bit numbers are loaded as words and converted by few instructions. Products of
    # even and of odd dims are products of their own.
    PAIRS: tl.constexpr = V == H and takes_pairs(KV, q.dtype, H, q.shape[1])
    if KV == FP8:
        scale = scale * tl.load(k_scale_ptr + kv_head)
    if PAIRS:
        if KV == FP8:
            q, scale = as_float16(q, scale)
            acc = acc * WEIGHT
        q, q_odd = split_pairs(q)
        acc, acc_odd = split_pairs(acc)
        h = tl.arange(0, acc.shape[1])
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16))
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    WORDS: tl.constexpr = H // 2 if PAIRS else H
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        if WINDOWED:  # pages before the window may belong to other requests
            inside = inside & (n > tl.min(query) - window)
        page = tl.load(table + n // Z, mask=inside, other=0).to(tl.int64)
        head_at = (page * Z + n % Z) * K + kv_head
        at = head_at * WORDS
        if V < H:
            h_k = V + tl.arange(0, q_rest.shape[1])
            in_v = h < V
        else:
            h_k = h
            in_v = h < WORDS
        k = tl.load(
            k_ptr + at[None, :] + h_k[:, None],
            mask=inside[None, :] & (h_k[:, None] < WORDS), other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_ptr + at[:, None] + h[None, :], mask=inside[:, None] & in_v[None, :], other=0.0
        )
        if PAIRS:
            score = tl.dot(q, unpacked(k, KV, False))
            score = tl.dot(q_odd, unpacked(k, KV, True), score) * scale
        else:
            k, v = k.to(q.dtype), v.to(q.dtype)  # exact
            score = tl.dot(q_rest, k, input_precision="ieee")
            if V < H:
                score = tl.dot(q, tl.trans(v), score, input_precision="ieee")
            score = score * scale
        if KV == INT8:
            score = score * tl.load(k_scale_ptr + head_at, mask=inside, other=0.0)[None, :]
        if SOFTCAP > 0:
            score = tanh(score) * SOFTCAP
        if MASK == ENDED:
            score = tl.where(inside[None, :], score, -float("inf"))
        if MASK == CAUSAL:
            seen = n[None, :] < key_end[:, None]
            if WINDOWED:
                seen = seen & (n[None, :] > query[:, None] - window)
            score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(p, 1)
        if KV == INT8:
            p = p * tl.load(v_scale_ptr + head_at, mask=inside, other=0.0)[None, :]
        if PAIRS:
            if KV == FP8:
                p = p * WEIGHT
            p = p.to(q.dtype)
            acc = tl.dot(p, unpacked(v, KV, False), acc * shrink[:, None])
            acc_odd = tl.dot(p, unpacked(v, KV, True), acc_odd * shrink[:, None])
        else:
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    if PAIRS:
        acc = join_pairs(acc, acc_odd)
        if KV == FP8:
            acc = acc * (1 / WEIGHT)
    return acc, mass, top


@triton.jit
def times_value_scale(acc, v_scale_ptr, kv_head, KV: tl.constexpr):
    """Return the sums of values, times the scale of FP8 values. Call it after the last `attend`."""
    if KV == FP8:
        acc = acc * tl.load(v_scale_ptr + kv_head)
    return acc
