"""The KV pools: the tensors that hold keys and values, layer by layer.

The other modules of this package manage page ids and never see these tensors. Memory is not
initialised, because a slot is read only after a step has stored into it. The pools of window groups
are an exception and start as zeros: some attention kernels read blocks that begin before the
window, mask their scores, and multiply their values by 0, so the values must not be NaN.

Axes: P pages, Z page size, K local key/value heads, H head dim.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from minisgl import plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """One layer's cache. k, v: [P, Z, K, H], contiguous; token slot = page * Z + offset.

    If keys are the values, too, k and v are one tensor. k_scale, v_scale: of numbers of 8 bits, see
    `minisgl_zoo.kv8.pool`.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def write(self, slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Store tokens in their slots, as the specification of `Ops.store_kv`."""
        self.k.flatten(0, 1)[slots_T] = k_TKH
        self.v.flatten(0, 1)[slots_T] = v_TKH

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, K, H] of pages, float32."""
        return self.k[pages].flatten(0, 1).float(), self.v[pages].flatten(0, 1).float()


class BaseKVCachePool(ABC):
    """The interface of a pool for the engine and the attention backends."""

    page_size: int

    @abstractmethod
    def layer(self, layer_id: int) -> LayerPool:
        """Return the cache of one layer. The tensors never change."""


class MHAKVCache(BaseKVCachePool):
    """Keys and values per head (multi-head, grouped-query and multi-query attention).

    dtype: that of the activations; or int8 or float8_e4m3fn, see `minisgl_zoo.kv8.pool`.
    """

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
        values_are_keys: bool = False,
    ) -> None:
        self.page_size = page_size
        num_vectors = 1 if values_are_keys else 2
        shape = (num_layers, num_vectors, num_pages, page_size, num_kv_heads, head_dim)
        create = _zeros if zeroed else torch.empty
        make_layer: Callable[..., LayerPool] = LayerPool
        if dtype.itemsize == 1:
            make_layer = plugins.need("kv_formats", "pool", "a KV cache in 8 bits")
        layers = create(shape, dtype=dtype, device=device).unbind()
        self._layers = [make_layer(k=layer[0], v=layer[-1]) for layer in layers]

    def layer(self, layer_id: int) -> LayerPool:
        return self._layers[layer_id]


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU their memory is taken when it is first written, and a start does not
    fill it."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes)  # the system fills its pages with zeros
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


create_kvcache_pool = MHAKVCache
"""Returns a pool for layers with `num_kv_heads` local key/value heads of size `head_dim`: there is
one class."""
