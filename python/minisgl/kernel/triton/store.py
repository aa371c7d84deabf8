"""Stores keys and values in the cache, where no fused kernel has done it.

Axes: T tokens, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.ops import check_store
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


def store_kv(k_TKH: Tensor, v_TKH: Tensor, slots_T: Tensor, pool: LayerPool) -> None:
    """See `Ops.store_kv`; the heads of a token are packed."""
    check_store(k_TKH, v_TKH, slots_T, pool)
    num_tokens, num_heads, head_dim = k_TKH.shape
    if not num_tokens:
        return
    heads, dims = power_of_2(num_heads), power_of_2(head_dim)
    _launch(
        (num_tokens, 1, 1),
        (k_TKH, v_TKH, slots_T, *tensors_of(pool), k_TKH.stride(0), v_TKH.stride(0)),
        (num_heads, head_dim, kind_of(pool), heads, dims),
        dtype=(k_TKH.dtype, pool.k.dtype), num_warps=min(max(heads * dims // 256, 1), 8),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["k_stride", "v_stride"],
    do_not_specialize_on_alignment=["k_ptr", "v_ptr", "slots_ptr"],
)
def _store_kv(
    k_ptr, v_ptr, slots_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, k_stride, v_stride,
    K: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    begin(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    is_head = (head < K) & (slot >= 0)
    inside = is_head[:, None] & (dim[None, :] < H)
    at = head[:, None] * H + dim[None, :]
    k = tl.load(k_ptr + token * k_stride + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + token * v_stride + at, mask=inside, other=0.0)
    if KV == FP8:
        k = to_fp8(k, tl.load(k_scale_ptr + head, mask=is_head, other=1.0)[:, None])
        v = to_fp8(v, tl.load(v_scale_ptr + head, mask=is_head, other=1.0)[:, None])
    if KV == INT8:
        k_scale, v_scale = scale_of_int8(largest_of(k)), scale_of_int8(largest_of(v))
        tl.store(k_scale_ptr + slot * K + head, k_scale, mask=is_head)
        tl.store(v_scale_ptr + slot * K + head, v_scale, mask=is_head)
        k, v = to_int8(k, k_scale[:, None]), to_int8(v, v_scale[:, None])
    tl.store(k_pool_ptr + slot * K * H + at, k, mask=inside)
    tl.store(v_pool_ptr + slot * K * H + at, v, mask=inside)


_launch = Launcher(_store_kv)
