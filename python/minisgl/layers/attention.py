"""From projected q, k, v to attended heads: norm where the family has one, rotate, attend.

Axes: T tokens, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.attention import AttnLayer, BaseAttnBackend
from minisgl.layers.base import Identity, StateLessOP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from minisgl.core import Batch


class AttentionLayer(StateLessOP):
    """The backend of the batch's context stores k and v, and attends."""

    def __init__(
        self,
        layer: AttnLayer,
        *,
        rope: RotaryEmbedding,
        q_norm: RMSNorm | Identity,
        k_norm: RMSNorm | Identity,
    ) -> None:
        super().__init__()
        self.layer, self.rope, self.q_norm, self.k_norm = layer, rope, q_norm, k_norm
        q_size, kv_size = layer.num_q_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.sizes = [q_size, kv_size, kv_size]

    def forward(self, qkv: Tensor, batch: Batch) -> Tensor:
        """[T, (N + 2K) * H], q then k then v -> [T, N * H]."""
        q_TNH, k_TKH, v_TKH = (
            x.view(len(x), -1, self.layer.head_dim) for x in torch.split(qkv, self.sizes, dim=-1)
        )
        q_TNH, k_TKH = self.rope.forward(
            self.q_norm.forward(q_TNH), self.k_norm.forward(k_TKH), batch.positions
        )
        attn: BaseAttnBackend = batch.context.attn
        return attn.forward(q_TNH, k_TKH, v_TKH, self.layer, batch).flatten(1)
