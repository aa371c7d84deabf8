"""Keys and values into the cache, for attention whose q, k and v no fused kernel makes.

Axes: T tokens, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.ops import check_store
from minisgl.kernel.sizes import power_of_2
from minisgl.kernel.triton.launch import Launcher, begin

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool


def store_kv(k_TKH: Tensor, v_TKH: Tensor, slots_T: Tensor, pool: LayerPool) -> None:
    """See `Ops.store_kv`; the heads of a token are packed."""
    check_store(k_TKH, v_TKH, slots_T, pool)
    num_tokens, num_heads, head_dim = k_TKH.shape
    if not num_tokens:
        return
    size = num_heads * head_dim
    block = power_of_2(size)
    _launch(
        (num_tokens, 1, 1),
        (k_TKH, v_TKH, slots_T, pool.k, pool.v, k_TKH.stride(0), v_TKH.stride(0)),
        (size, block), dtype=k_TKH.dtype, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["k_stride", "v_stride"],
    do_not_specialize_on_alignment=["k_ptr", "v_ptr", "slots_ptr"],
)
def _store_kv(
    k_ptr, v_ptr, slots_ptr, k_pool_ptr, v_pool_ptr, k_stride, v_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    begin(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    inside = (at < SIZE) & (slot >= 0)
    k = tl.load(k_ptr + token * k_stride + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + token * v_stride + at, mask=inside, other=0.0)
    tl.store(k_pool_ptr + slot * SIZE + at, k, mask=inside)
    tl.store(v_pool_ptr + slot * SIZE + at, v, mask=inside)


_launch = Launcher(_store_kv)
