"""KV pools of 8 bits: a number times a scale is the value.

int8 has a scale for each token and head: the largest magnitude of its H numbers is 127. It is
written with them. fp8 (e4m3) has a scale for each head, 1 unless the checkpoint has one; numbers
beyond 448 times the scale are clamped to that.

A token's numbers depend only on its key and value, not on its page, its neighbours or the step.

Axes: P pages, Z page size, T tokens, K local key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.kvcache.pool import LayerPool

MOST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLayerPool(LayerPool):
    """k_scale, v_scale: float32, [K] with fp8, [P, Z, K] with int8."""

    k_scale: Tensor
    v_scale: Tensor

    def write(self, slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        keys, values = (k_TKH, self.k, self.k_scale), (v_TKH, self.v, self.v_scale)
        for x_TKH, pool, scale in (keys, values):
            if pool.dtype == torch.int8:
                scale_TK = scale_of(x_TKH)
                scale.flatten(0, 1)[slots_T] = scale_TK
            else:
                scale_TK = scale
            pool.flatten(0, 1)[slots_T] = quantise(x_TKH, scale_TK, pool.dtype)

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        k_scale, v_scale = self.k_scale, self.v_scale
        if self.k.dtype == torch.int8:
            k_scale, v_scale = k_scale[pages].flatten(0, 1), v_scale[pages].flatten(0, 1)
        return (
            self.k[pages].flatten(0, 1).float() * k_scale[..., None],
            self.v[pages].flatten(0, 1).float() * v_scale[..., None],
        )


def quantised_layer(*, k: Tensor, v: Tensor) -> LayerPool:
    """A layer's pool. The scales of fp8 are 1, those of int8 belong to no token yet."""
    num_vectors = 1 if k.data_ptr() == v.data_ptr() else 2
    if k.dtype == torch.int8:
        scales = torch.zeros((num_vectors, *k.shape[:3]), device=k.device)
    else:
        scales = torch.ones((num_vectors, k.shape[2]), device=k.device)
    return QuantisedLayerPool(k=k, v=v, k_scale=scales[0], v_scale=scales[-1])


def scale_of(x_TKH: Tensor) -> Tensor:
    """The scales [T, K] that int8 takes; 1 for zeros."""
    largest_TK = x_TKH.float().abs().amax(-1)
    return torch.where(largest_TK == 0, 1.0, largest_TK / MOST[torch.int8])


def quantise(x_TKH: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of `dtype`, ties to even. scale: [T, K] or [K]."""
    numbers = (x_TKH.float() / scale[..., None]).clamp(-MOST[dtype], MOST[dtype])
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
