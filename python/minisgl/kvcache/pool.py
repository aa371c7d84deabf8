"""The tensors behind the pages: where keys and values live, layer by layer.

The host half of this package hands out pages and never sees these tensors. Memory is left
uninitialised: a slot is read only after a step has stored into it. The exception is a window group,
whose pools start as zeros: some attention kernels read a block that begins behind the window, mask
its scores, and then multiply its values by 0, which must not be NaN.

Axes: L layers, 2 keys and values, P pages, Z page size, K local key/value heads, H head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """One layer's cache. k, v: [P, Z, K, H], contiguous; token slot = page * Z + offset."""

    k: Tensor
    v: Tensor


class BaseKVCachePool(ABC):
    """What the engine and the attention backends know of a pool."""

    num_pages: int
    page_size: int
    dtype: torch.dtype

    @abstractmethod
    def layer(self, layer_id: int) -> LayerPool:
        """The cache of one layer, always the same tensors."""


class MHAKVCache(BaseKVCachePool):
    """Keys and values per head (multi-head, grouped-query and multi-query attention)."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        zeroed: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        create = torch.zeros if zeroed else torch.empty
        self._layers = [LayerPool(k=k, v=v) for k, v in create(shape, dtype=dtype, device=device)]

    def layer(self, layer_id: int) -> LayerPool:
        return self._layers[layer_id]

    @staticmethod
    def page_bytes(
        *,
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> int:
        """Bytes that one page takes over all layers."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize


def create_kvcache_pool(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    zeroed: bool = False,
) -> BaseKVCachePool:
    """The pool of layers that all cache `num_kv_heads` (local) heads of `head_dim`."""
    return MHAKVCache(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        zeroed=zeroed,
    )
