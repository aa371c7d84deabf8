"""Attention after the q/k/v projection: norm of q and k (some families), rotary embedding, attend.

Axes: T tokens, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minisgl.attention import AttnLayer, BaseAttnBackend
from minisgl.layers.base import StateLessOP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from minisgl.core import Batch


class HeadNorm(Protocol):
    def forward(self, x: Tensor, /) -> Tensor: ...


class AttentionLayer(StateLessOP):
    """Attention by the backend of the layer's KV pool, which also stores k and v."""

    norms_values = False

    def __init__(
        self,
        layer: AttnLayer,
        *,
        rope: RotaryEmbedding,
        q_norm: HeadNorm,
        k_norm: HeadNorm,
    ) -> None:
        super().__init__()
        self.layer, self.rope, self.q_norm, self.k_norm = layer, rope, q_norm, k_norm
        q_size, kv_size = layer.num_q_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.sizes = [q_size, kv_size, kv_size]

    def forward(self, qkv: Tensor, batch: Batch) -> Tensor:
        """qkv: q, k and v side by side, [T, (N + 2K) * H]. Returns [T, N * H]."""
        view = batch.pools[self.layer.pool]
        attn: BaseAttnBackend = view.context.attn
        return attn.forward_qkv(qkv, self, view)

    # --- minisgl.attention.QKVSteps --------------------------------------------------------------

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = (
            x.view(len(x), -1, self.layer.head_dim) for x in torch.split(qkv, self.sizes, dim=-1)
        )
        q_TNH, k_TKH = self.rope.forward(
            self.q_norm.forward(q_TNH), self.k_norm.forward(k_TKH), positions_T
        )
        return q_TNH, k_TKH, v_TKH

    @property
    def q_norm_weight(self) -> Tensor | None:
        return self.q_norm.weight if isinstance(self.q_norm, RMSNorm) else None

    @property
    def k_norm_weight(self) -> Tensor | None:
        return self.k_norm.weight if isinstance(self.k_norm, RMSNorm) else None

    @property
    def norm_eps(self) -> float:
        return self.q_norm.eps if isinstance(self.q_norm, RMSNorm) else 0.0

    @property
    def cos_sin(self) -> Tensor:
        return self.rope.cos_sin

    @property
    def by_place(self) -> bool:
        return self.rope.by_place
