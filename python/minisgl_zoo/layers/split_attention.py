"""Attention with a step between projection and attention that no fused kernel supports.

The backends' `forward_qkv` norms, rotates and stores in one kernel. Here `split` norms and rotates
in plain torch, and the backend gets q, k and v.

Axes: T tokens, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.layers.attention import AttentionLayer

if TYPE_CHECKING:
    from minisgl.core import Batch


class SplitAttentionLayer(AttentionLayer):
    """A subclass writes `split`."""

    def forward(self, qkv: Tensor, batch: Batch) -> Tensor:
        view = batch.pools[self.layer.pool]
        q_TNH, k_TKH, v_TKH = self.split(qkv, view.positions)
        attended: Tensor = view.context.attn.forward(q_TNH, k_TKH, v_TKH, self.layer, view)
        return attended.flatten(1)
