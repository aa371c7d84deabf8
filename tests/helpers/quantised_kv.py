"""The numbers of a KV cache in 8 bits, computed without the code that fills it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from minisgl.kvcache.pool import LayerPool

FP8, INT8 = torch.float8_e4m3fn, torch.int8
KV_DTYPES = (FP8, INT8)
E4M3 = torch.arange(127, dtype=torch.uint8).view(FP8).double()
"""The magnitudes of e4m3, by their bits: 0 to 448, ascending."""


def nearest_e4m3(x: Tensor) -> Tensor:
    """Return the nearest number of e4m3 in float64: of two as near the one with even bits, at most
    448."""
    size = x.double().abs().clamp(max=448)
    high = torch.searchsorted(E4M3, size).clamp(max=126)
    low = (high - 1).clamp(min=0)
    to_low, to_high = size - E4M3[low], E4M3[high] - size
    is_high = (to_high < to_low) | ((to_high == to_low) & (high % 2 == 0))
    return E4M3[torch.where(is_high, high, low)] * x.double().sign()


def numbers_and_scale(x_TKH: Tensor, kv_dtype: torch.dtype, scale_K: Tensor) -> tuple[Tensor, ...]:
    """Return float64 numbers [T, K, H] and scales [T, K]. scale_K: the scales of fp8."""
    if kv_dtype == FP8:
        scale_TK = scale_K.expand(x_TKH.shape[:2])
        return nearest_e4m3(x_TKH.float() / scale_TK[..., None]), scale_TK.double()
    scale_TK = x_TKH.float().abs().amax(-1) / torch.tensor(127.0)
    scale_TK[scale_TK == 0] = 1
    return (x_TKH.float() / scale_TK[..., None]).double().round(), scale_TK.double()


def rounded(x_TKH: Tensor, kv_dtype: torch.dtype, scale_K: Tensor) -> Tensor:
    """Return the numbers that attention reads, in float64."""
    numbers, scale_TK = numbers_and_scale(x_TKH, kv_dtype, scale_K)
    return numbers * scale_TK[..., None]


def poison(layer: LayerPool) -> None:
    """Fill every slot with NaN. The scales of fp8 differ by head, and between keys and values that
    are not the same tensor."""
    if layer.k.dtype == INT8:
        assert layer.k_scale is not None
        assert layer.v_scale is not None
        for numbers, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
            numbers.fill_(99)
            scale.fill_(torch.nan)
        return
    layer.k.fill_(torch.nan)
    layer.v.fill_(torch.nan)
    if layer.k_scale is not None and layer.v_scale is not None:
        heads = torch.arange(len(layer.k_scale))
        layer.k_scale.copy_(0.013 * 2**heads)
        is_one = layer.v.data_ptr() == layer.k.data_ptr()
        layer.v_scale.copy_(layer.k_scale if is_one else 0.11 / 3**heads)


def as_stored(layer: LayerPool, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers that attention reads after k and v [T, K, H] are stored."""
    if layer.k_scale is None or layer.v_scale is None:
        return k, v
    dtype = layer.k.dtype
    return rounded(k, dtype, layer.k_scale), rounded(v, dtype, layer.v_scale)


def put(layer: LayerPool, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Store keys and values [T, K, H] in slots. Returns the numbers that attention reads."""
    for x, pool, scale in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        if scale is None:
            pool.flatten(0, 1)[slots] = x
            continue
        numbers, scale_TK = numbers_and_scale(x, pool.dtype, scale)
        pool.flatten(0, 1)[slots] = numbers.float().to(pool.dtype)
        if pool.dtype == INT8:
            scale.flatten(0, 1)[slots] = scale_TK.float()
    return as_stored(layer, k, v)


def bits(layer: LayerPool) -> list[Tensor]:
    """Return copies of the pool's tensors as integers, so that NaN equals NaN."""
    tensors = [layer.k, layer.v]
    if layer.k.dtype == INT8 and layer.k_scale is not None and layer.v_scale is not None:
        tensors += [layer.k_scale.view(torch.int32), layer.v_scale.view(torch.int32)]
    return [(x.view(torch.uint8) if x.dtype == FP8 else x).clone().cpu() for x in tensors]


class RoundedCache(DynamicCache):
    """transformers' cache, with the numbers of a cache in 8 bits."""

    def __init__(self, kv_dtype: torch.dtype, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        """scales: the scales of fp8, of keys and values in all heads."""
        super().__init__()
        self.kv_dtype, self.scales = kv_dtype, scales

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = [
            rounded(x[0].transpose(0, 1), self.kv_dtype, torch.full(x.shape[1:2], scale))
            .transpose(0, 1)[None]
            .to(x.dtype)
            for x, scale in zip((key_states, value_states), self.scales, strict=True)
        ]
        return super().update(*made, *args, **kwargs)


class RoundedLatents(RoundedCache):
    """transformers keeps latents where keys belong, and the rotating parts in the values' place.
    Here they are one key."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        both = torch.cat((key_states, value_states), -1)[0].transpose(0, 1)
        made = rounded(both, self.kv_dtype, torch.ones(1)).to(both.dtype).transpose(0, 1)[None]
        parts = made.tensor_split([key_states.shape[-1]], -1)
        return DynamicCache.update(self, *parts, *args, **kwargs)
