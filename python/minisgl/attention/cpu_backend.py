"""Paged attention in C++: the cache is read where it lies, see `kernel/csrc/attention.cpp`."""

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

    def __init__(self, library: Any) -> None:
        """`library` is what `minisgl.kernel.jit.load_library` returned, or its `Calls`."""
        self._attend = library.paged_attention
        self._attend_qkv = library.qkv_attention

    def prepare(self, plan: Plan) -> BaseAttnMetadata:
        return BaseAttnMetadata()

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        pool = batch.context.kv_pool.layer(layer.layer_id)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        self._attend(
            q_TNH,
            k_TKH,
            v_TKH,
            pool.k,
            pool.v,
            pool.k_scale,
            pool.v_scale,
            batch.slots,
            batch.context.page_table,
            batch.rows,
            out_TNH,
            layer.sinks.weight if layer.sinks else None,
            layer.scale,
            layer.softcap or 0.0,
            layer.window or 0,
            torch.get_num_threads(),
        )
        return out_TNH

    def forward_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor:
        if steps.norms_values:
            return super().forward_qkv(qkv, steps, batch)
        layer = steps.layer
        pool = batch.context.kv_pool.layer(layer.layer_id)
        out = torch.empty(qkv.shape[0], layer.num_q_heads * layer.head_dim, dtype=qkv.dtype)
        self._attend_qkv(
            qkv,
            steps.q_norm_weight,
            steps.k_norm_weight,
            steps.norm_eps,
            steps.cos_sin,
            batch.positions,
            pool.k,
            pool.v,
            pool.k_scale,
            pool.v_scale,
            batch.slots,
            batch.context.page_table,
            batch.rows,
            out,
            layer.sinks.weight if layer.sinks else None,
            layer.scale,
            layer.softcap or 0.0,
            layer.window or 0,
            torch.get_num_threads(),
        )
        return out
