"""Paged attention in Triton: decode rows by split-KV flash-decode, the others by extend.

Needs nothing but torch. Any head dim, page size, grouping and window; see
`minisgl.kernel.triton.attention`.

Axes: T tokens of this step, D of them decode, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer, BaseAttnBackend, BaseAttnMetadata, QKVSteps
from minisgl.core import Batch, Plan
from minisgl.kernel.ops import Ops
from minisgl.kernel.triton import attention, rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonAttnMetadata(BaseAttnMetadata):
    """lengths: tokens of the rows after the decode rows. Everything else is in `Batch.rows`."""

    lengths: list[int]


class TritonAttnBackend(BaseAttnBackend):
    name = "triton"

    def __init__(self, ops: Ops, num_cores: int) -> None:
        """num_cores: the device's multiprocessors."""
        self.ops, self.num_cores = ops, num_cores

    def prepare(self, plan: Plan) -> TritonAttnMetadata:
        first = plan.num_decodes
        lengths = [
            end - start for start, end in zip(plan.starts[first:], plan.ends[first:], strict=True)
        ]
        return TritonAttnMetadata(lengths=lengths)

    def forward_qkv(self, qkv: Tensor, steps: QKVSteps, batch: Batch) -> Tensor:
        q_TNH = norm_rope_store(qkv, steps, batch)
        return self.attend(q_TNH, steps.layer, batch).flatten(1)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: Batch
    ) -> Tensor:
        pool = batch.context.kv_pool.layer(layer.layer_id)
        self.ops.store_kv(k_TKH, v_TKH, batch.slots, pool)
        return self.attend(q_TNH.contiguous(), layer, batch)

    def attend(self, q_TNH: Tensor, layer: AttnLayer, batch: Batch) -> Tensor:
        """[T, N, H]; this step's k and v are stored already."""
        assert batch.rows is not None
        pool = batch.context.kv_pool.layer(layer.layer_id)
        lengths = batch.attn_metadata.lengths
        out_TNH = torch.empty_like(q_TNH)
        num_decodes = batch.rows.shape[1] - len(lengths)
        if num_decodes:
            self.decode(q_TNH[:num_decodes], layer, batch, out_TNH[:num_decodes])
        if lengths:
            attention.extend(
                q_TNH,
                pool.k,
                pool.v,
                batch.context.page_table,
                batch.rows[:, num_decodes:],
                scale=layer.scale,
                window=layer.window,
                lengths=lengths,
                out_TNH=out_TNH,
            )
        return out_TNH

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: Batch, out_DNH: Tensor) -> None:
        """Attend for the batch's first D rows, into out_DNH."""
        assert batch.rows is not None
        pool = batch.context.kv_pool.layer(layer.layer_id)
        attention.decode(
            q_DNH,
            pool.k,
            pool.v,
            batch.context.page_table,
            batch.rows,
            scale=layer.scale,
            window=layer.window,
            pieces=attention.num_pieces(len(q_DNH), layer.num_kv_heads, self.num_cores),
            out_BNH=out_DNH,
        )


def norm_rope_store(qkv: Tensor, steps: QKVSteps, batch: Batch) -> Tensor:
    """q [T, N, H], normed and rotated; k and v are in the pool."""
    layer = steps.layer
    pool = batch.context.kv_pool.layer(layer.layer_id)
    return rotary.norm_rope_store(
        qkv,
        pool.k,
        pool.v,
        batch.slots,
        batch.positions,
        steps.cos_sin,
        steps.q_norm_weight,
        steps.k_norm_weight,
        steps.norm_eps,
        num_q_heads=layer.num_q_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
    )
