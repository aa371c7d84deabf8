"""The steps between projection and attention in one kernel: norm per head, rotate, store k and v.

A program has some heads of a token. It reads them once, and writes q to a contiguous tensor and k
and v to their slots of the pool. Separate kernels would read and write each of them three times.

Axes: T tokens, N query heads, K key/value heads, H head dim, R rotary dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl.kernel.triton.quantised import (
    FP8,
    INT8,
    kind_of,
    largest_of,
    scale_of_int8,
    tensors_of,
    to_fp8,
    to_int8,
)

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool

BLOCK, WIDE_BLOCK, BLOCK_8 = 8192, 2048, 1024
"""The elements of a program, in whole heads, by times on an H200. `WIDE_BLOCK` is for heads above
128 dims. `BLOCK_8` is for pools of 8 bits: it is small, because programs that have only queries do
not quantise."""


def norm_rope_store(
    qkv: Tensor,
    pool: LayerPool,
    slots_T: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    keep: bool,
    norms_values: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, N, H], k and v [T, K, H] of qkv [T, (N + 2K) * H], and store k and v.

    As `Ops.rms_norm` (if there are weights), `Ops.apply_rope` and `Ops.store_kv` one after another,
    with their roundings. qkv is contiguous, and has only queries if num_kv_heads is 0. keep:
    whether k and v are returned as they are stored, before a pool quantises them; otherwise views
    of qkv are returned. norms_values: values are normed too, without a weight; only with weights of
    q and k.
    """
    num_tokens = len(qkv)
    q_TNH = torch.empty((num_tokens, num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    rotary_dim = cos_sin_PR.shape[1]
    k_TKH, v_TKH = (
        qkv.narrow(1, first * head_dim, num_kv_heads * head_dim).view(
            num_tokens, num_kv_heads, head_dim
        )
        for first in (num_q_heads, num_q_heads + num_kv_heads)
    )
    if keep:
        k_TKH = torch.empty(k_TKH.shape, dtype=qkv.dtype, device=qkv.device)
    if keep and norms_values:
        v_TKH = torch.empty(v_TKH.shape, dtype=qkv.dtype, device=qkv.device)
    half = power_of_2(rotary_dim // 2)
    rest = power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else 1
    size = 2 * half + (rest if rotary_dim < head_dim else 0)
    num_heads = num_q_heads + 2 * num_kv_heads
    block = BLOCK if head_dim <= 128 else WIDE_BLOCK
    if pool.k.dtype.itemsize == 1:
        block = BLOCK_8
    heads = min(power_of_2(num_heads), max(power_of_2(block // size + 1) // 2, 1))
    normed = q_weight is not None
    _launch(
        (num_tokens, -(-num_heads // heads), 1),
        (
            qkv, q_TNH, k_TKH, v_TKH, *tensors_of(pool), slots_T, positions_T, cos_sin_PR,
            q_weight if normed else qkv, qkv if k_weight is None else k_weight, eps,
        ),
        (
            num_q_heads, num_kv_heads, head_dim, rotary_dim, kind_of(pool), normed,
            norms_values, keep, heads, half, rest,
        ),
        dtype=(qkv.dtype, pool.k.dtype, q_weight.dtype if q_weight is not None else None),
        num_warps=min(max(power_of_2(heads * size // 1024), 1), 8),
    )  # fmt: skip
    return q_TNH, k_TKH, v_TKH


@triton.jit(do_not_specialize_on_alignment=["kept_v_ptr", "slots_ptr", "positions_ptr"])
def _norm_rope_store(
    qkv_ptr, q_ptr, kept_k_ptr, kept_v_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slots_ptr,
    positions_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, R: tl.constexpr, KV: tl.constexpr,
    NORM: tl.constexpr, VALUES: tl.constexpr, KEEP: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    begin(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    is_q, is_k, is_v = head < N, (head >= N) & (head < N + K), head >= N + K
    pair = (head < N + 2 * K) & (dim < R // 2)
    row = qkv_ptr + token * (N + 2 * K) * H + head * H
    low = tl.load(row + dim, mask=pair, other=0.0)
    high = tl.load(row + R // 2 + dim, mask=pair, other=0.0)
    rest_dim = R + tl.arange(0, REST)[None, :]
    in_rest = (head < N + 2 * K) & (rest_dim < H)
    dtype = low.dtype
    rest = low
    if R < H:
        rest = tl.load(row + rest_dim, mask=in_rest, other=0.0)
    if NORM:
        low32, high32 = low.to(tl.float32), high.to(tl.float32)
        square = tl.sum(low32 * low32 + high32 * high32, 1)
        if R < H:
            rest32 = rest.to(tl.float32)
            square += tl.sum(rest32 * rest32, 1)
        scale = tl.rsqrt(square / H + eps)[:, None]
        weight_low = _head_weight(q_weight_ptr, k_weight_ptr, is_q, is_k, dim, dim < R // 2)
        weight_high = _head_weight(
            q_weight_ptr, k_weight_ptr, is_q, is_k, R // 2 + dim, dim < R // 2
        )
        low_v, high_v = low, high
        if VALUES:
            low_v, high_v = (low32 * scale).to(dtype), (high32 * scale).to(dtype)
        low = tl.where(is_v, low_v, (low32 * scale * weight_low.to(tl.float32)).to(dtype))
        high = tl.where(is_v, high_v, (high32 * scale * weight_high.to(tl.float32)).to(dtype))
        if R < H:
            weight_rest = _head_weight(
                q_weight_ptr, k_weight_ptr, is_q, is_k, rest_dim, rest_dim < H
            )
            rest_v = rest
            if VALUES:
                rest_v = (rest32 * scale).to(dtype)
            rest = tl.where(is_v, rest_v, (rest32 * scale * weight_rest.to(tl.float32)).to(dtype))
    cos = tl.load(cos_sin_ptr + position * R + dim, mask=dim < R // 2, other=0.0).to(dtype)
    sin = tl.load(cos_sin_ptr + position * R + R // 2 + dim, mask=dim < R // 2, other=0.0)
    sin = sin.to(dtype)
    # Each product is rounded before the sum, as in the reference.
    turned_low = (low * cos).to(dtype) - (high * sin).to(dtype)
    turned_high = (high * cos).to(dtype) + (low * sin).to(dtype)
    low = tl.where(is_v, low, turned_low)
    high = tl.where(is_v, high, turned_high)

    q_row = q_ptr + (token * N + head) * H
    tl.store(q_row + dim, low, mask=pair & is_q)
    tl.store(q_row + R // 2 + dim, high, mask=pair & is_q)
    if KEEP:
        kept = kept_k_ptr + (token * K + head - N) * H
        tl.store(kept + dim, low, mask=pair & is_k)
        tl.store(kept + R // 2 + dim, high, mask=pair & is_k)
        if R < H:
            tl.store(kept + rest_dim, rest, mask=in_rest & is_k)
        if VALUES:
            kept = kept_v_ptr + (token * K + head - N - K) * H
            tl.store(kept + dim, low, mask=pair & is_v)
            tl.store(kept + R // 2 + dim, high, mask=pair & is_v)
            if R < H:
                tl.store(kept + rest_dim, rest, mask=in_rest & is_v)
    if R < H:
        tl.store(q_row + rest_dim, rest, mask=in_rest & is_q)
    if (tl.program_id(1) + 1) * HEADS > N:
        _store(
            low, high, rest, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot, head, dim, rest_dim,
            N, K, H, R, KV,
        )  # fmt: skip


@triton.jit
def _store(
    low, high, rest, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot, head, dim, rest_dim,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, R: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Write the keys and values among some heads of a token to its slot."""
    is_k, is_v = (head >= N) & (head < N + K), head >= N + K
    pair = (head < N + 2 * K) & (dim < R // 2)
    in_rest = (head < N + 2 * K) & (rest_dim < H)
    k_row = k_ptr + (slot * K + head - N) * H
    v_row = v_ptr + (slot * K + head - N - K) * H
    stored = slot >= 0
    if KV == FP8:
        of_k = tl.load(k_scale_ptr + head - N, mask=is_k, other=1.0)
        of_v = tl.load(v_scale_ptr + head - N - K, mask=is_v & (head < N + 2 * K), other=1.0)
        scale8 = tl.where(is_k, of_k, of_v)
        low, high = to_fp8(low, scale8), to_fp8(high, scale8)
        if R < H:
            rest = to_fp8(rest, scale8)
    if KV == INT8:
        largest = _larger(largest_of(low), largest_of(high))
        if R < H:
            largest = _larger(largest, largest_of(rest))
        scale8 = scale_of_int8(largest)[:, None]
        scale_at = slot * K + head - N
        tl.store(k_scale_ptr + scale_at, scale8, mask=is_k & stored)
        tl.store(v_scale_ptr + scale_at - K, scale8, mask=is_v & (head < N + 2 * K) & stored)
        low, high = to_int8(low, scale8), to_int8(high, scale8)
        if R < H:
            rest = to_int8(rest, scale8)
    tl.store(k_row + dim, low, mask=pair & is_k & stored)
    tl.store(k_row + R // 2 + dim, high, mask=pair & is_k & stored)
    tl.store(v_row + dim, low, mask=pair & is_v & stored)
    tl.store(v_row + R // 2 + dim, high, mask=pair & is_v & stored)
    if R < H:
        tl.store(k_row + rest_dim, rest, mask=in_rest & is_k & stored)
        tl.store(v_row + rest_dim, rest, mask=in_rest & is_v & stored)


@triton.jit
def _larger(a, b):
    """Return the larger; NaN if one of them is NaN."""
    return tl.maximum(a, b) + (a * 0.0 + b * 0.0)


@triton.jit
def _head_weight(q_weight_ptr, k_weight_ptr, is_q, is_k, dim, mask):
    q_weight = tl.load(q_weight_ptr + dim, mask=mask & is_q, other=0.0)
    return q_weight + tl.load(k_weight_ptr + dim, mask=mask & is_k, other=0.0)


_launch = Launcher(_norm_rope_store)
