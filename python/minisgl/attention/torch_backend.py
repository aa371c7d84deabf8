"""The reference for paged attention: it gathers each row's keys and values, with explicit softmax.

It is simple, not fast: every step copies every row's cache. It runs wherever torch runs, and the
other backends are tested against it. Scores, softmax and the weighted sum are float32.

Axes: T tokens of this step, Q tokens of one row, C its context, N query heads, K key/value heads,
G query heads per key/value head, H head dim, V dims of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer, BaseAttnBackend, BaseAttnMetadata
from minisgl.core import Plan, PoolBatch
from minisgl.kernel.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAttnMetadata(BaseAttnMetadata):
    """(table_idx, start, end) of each row, see `Plan`."""

    rows: list[tuple[int, int, int]]


class TorchAttnBackend(BaseAttnBackend):
    name = "torch"
    reads_window_only = True
    takes_two_way = True

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def prepare(self, plan: Plan) -> TorchAttnMetadata:
        return TorchAttnMetadata(
            rows=list(zip(plan.table_idxs, plan.starts, plan.ends, strict=True))
        )

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        pool = batch.context.kv_pool.layer(layer.layer_id)
        self.ops.store_kv(k_TKH, v_TKH, batch.slots, pool)
        out_TNV = torch.empty_like(q_TNH[..., : layer.latent])
        offset, key_ends = 0, batch.key_ends if layer.two_way else None
        for table_idx, start, end in batch.attn_metadata.rows:
            page_size = pool.k.shape[1]
            # Pages before the window may belong to other requests by now.
            begin = max(start - layer.window + 1, 0) if layer.window else 0
            first = begin // page_size
            pages = batch.context.page_table[table_idx, first : -(-end // page_size)]
            keys = slice(begin - first * page_size, end - first * page_size)
            k_CKH, v_CKH = pool.read(pages)
            span = slice(offset, offset + end - start)
            ends = None if key_ends is None else key_ends[span]
            out_TNV[span] = _attend(
                q_TNH[span], k_CKH[keys], v_CKH[keys], start, begin, layer, ends
            )
            offset = span.stop
        assert offset == len(q_TNH), f"the plan has {offset} tokens, q {len(q_TNH)}"
        return out_TNV


def _attend(
    q_QNH: Tensor,
    k_CKH: Tensor,
    v_CKH: Tensor,
    start: int,
    begin: int,
    layer: AttnLayer,
    ends_Q: Tensor | None = None,
) -> Tensor:
    """Attend: queries at positions start, start + 1, ...; keys at begin, begin + 1, ...

    Keys and values are float32. ends_Q: see `PoolBatch.key_ends`.
    """
    q_QKGH = q_QNH.float().view(len(q_QNH), layer.num_kv_heads, -1, layer.head_dim)
    scores_KGQC = torch.einsum("qkgh,ckh->kgqc", q_QKGH, k_CKH) * layer.scale
    query_Q1 = torch.arange(start, start + len(q_QNH), device=q_QNH.device)[:, None]
    key_1C = torch.arange(begin, begin + len(k_CKH), device=q_QNH.device)[None]
    hidden_QC = key_1C > query_Q1 if ends_Q is None else key_1C >= ends_Q[:, None]
    if layer.window is not None:
        hidden_QC |= key_1C <= query_Q1 - layer.window
    if layer.softcap:
        scores_KGQC = layer.softcap * (scores_KGQC / layer.softcap).tanh()
    scores_KGQC = scores_KGQC.masked_fill(hidden_QC, -torch.inf)
    if layer.sinks:
        sinks_KG11 = layer.sinks.weight.view(layer.num_kv_heads, -1, 1, 1)
        sinks_KGQ1 = sinks_KG11.expand(*scores_KGQC.shape[:3], 1)
        scores_KGQC = torch.cat((scores_KGQC, sinks_KGQ1), -1)
    weights_KGQC = scores_KGQC.softmax(-1)[..., : len(k_CKH)]
    out_QKGV = torch.einsum("kgqc,ckv->qkgv", weights_KGQC, v_CKH[..., : layer.latent])
    return out_QKGV.flatten(1, 2).to(q_QNH.dtype)
