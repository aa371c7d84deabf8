"""The KV pools: the tensors that hold keys and values, layer by layer.

The other modules of this package manage page ids and never see these tensors. Memory is not
initialised, because a slot is read only after a step has stored into it. The pools of window groups
are an exception and start as zeros: some attention kernels read blocks that begin before the
window, mask their scores, and multiply their values by 0, so the values must not be NaN.

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
    """The interface of a pool for the engine and the attention backends."""

    num_pages: int
    page_size: int
    dtype: torch.dtype

    @abstractmethod
    def layer(self, layer_id: int) -> LayerPool:
        """Return the cache of one layer. The tensors never change."""


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
    """Return a pool for layers with `num_kv_heads` local key/value heads of size `head_dim`."""
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
