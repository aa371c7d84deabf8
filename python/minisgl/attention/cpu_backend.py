"""Paged attention in C++, which reads the cache in place: see `kernel/csrc/attention.cpp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer, BaseAttnBackend, BaseAttnMetadata, QKVSteps
from minisgl.core import Plan, PoolBatch


class CpuAttnBackend(BaseAttnBackend):
    name = "cpu"
    graph_safe = True
    reads_window_only = True
    takes_two_way = True

    def __init__(self, library: Any) -> None:
        """`library` is what `minisgl.kernel.jit.load_library` returned, or its `Calls`."""
        self._attend = library.paged_attention
        self._attend_qkv = library.qkv_attention

    def prepare(self, plan: Plan) -> BaseAttnMetadata:
        return BaseAttnMetadata()

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        self._attend(q_TNH, k_TKH, v_TKH, *_cache(layer, batch), out_TNH, *_constants(layer))
        return out_TNH[..., : layer.latent]

    def forward_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor:
        if steps.norms_values:
            return super().forward_qkv(qkv, steps, batch)
        layer = steps.layer
        out = torch.empty(qkv.shape[0], layer.num_q_heads * layer.head_dim, dtype=qkv.dtype)
        self._attend_qkv(
            qkv,
            steps.q_norm_weight,
            steps.k_norm_weight,
            steps.norm_eps,
            steps.cos_sin,
            batch.positions,
            *_cache(layer, batch),
            out,
            *_constants(layer),
        )
        return out


def _cache(layer: AttnLayer, batch: PoolBatch) -> tuple[Tensor | None, ...]:
    """Return the arguments of both functions that say where the step's cache is, and which of it
    each token sees."""
    pool, context = batch.context.kv_pool.layer(layer.layer_id), batch.context
    scales, key_ends = (pool.k_scale, pool.v_scale), batch.key_ends if layer.two_way else None
    return (pool.k, pool.v, *scales, batch.slots, context.page_table, batch.rows, key_ends)


def _constants(layer: AttnLayer) -> tuple[Tensor | float | None, ...]:
    """Return the last arguments of both functions: the layer's constants and the threads."""
    sinks = layer.sinks.weight if layer.sinks else None
    return (sinks, layer.scale, layer.softcap or 0.0, layer.window or 0, torch.get_num_threads())
