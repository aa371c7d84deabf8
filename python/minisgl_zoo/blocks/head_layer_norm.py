"""Layer norms of queries and keys per head, each head with its own weight (Command R+).

Axes: T tokens, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.layers.base import BaseOP, Identity
from minisgl.layers.shard import split_heads
from minisgl.quantization import Part
from minisgl_zoo.blocks.parallel_block import ParallelBlock
from minisgl_zoo.layers.split_attention import SplitAttentionLayer

if TYPE_CHECKING:
    from minisgl.layers import AttentionLayer
    from minisgl.models.decoder import LayerBuild


class HeadLayerNorm(BaseOP):
    """Layer norm over the last axis, without a bias, in float32 as in Hugging Face. heads: those of
    this rank."""

    weight: Tensor

    def __init__(self, at: LayerBuild, *, heads: range, num_heads: int, name: str) -> None:
        super().__init__()
        self.eps = at.spec.config.norm_eps
        name, shape = f"{at.layer.prefix}.self_attn.{name}.weight", (num_heads, at.layer.head_dim)
        self.declare("weight", at.build.dtype, Part(name=name, shape=shape, axis=0, share=heads))

    def forward(self, x_TNH: Tensor) -> Tensor:
        normed_TNH = F.layer_norm(x_TNH.float(), x_TNH.shape[-1:], eps=self.eps)
        return (self.weight.float() * normed_TNH).to(x_TNH.dtype)


class NormedHeads(SplitAttentionLayer):
    def __init__(self, at: LayerBuild, attend: AttentionLayer) -> None:
        super().__init__(attend.layer, rope=at.rope, q_norm=Identity(), k_norm=Identity())
        layer, comm = at.layer, at.build.comm
        own = split_heads(layer.num_heads, layer.num_kv_heads, comm.size)[comm.rank]
        self.each_q_norm = HeadLayerNorm(at, heads=own.q, num_heads=layer.num_heads, name="q_norm")
        self.each_k_norm = HeadLayerNorm(
            at, heads=own.kv, num_heads=layer.num_kv_heads, name="k_norm"
        )

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = (
            x.view(len(x), -1, self.layer.head_dim) for x in torch.split(qkv, self.sizes, dim=1)
        )
        q_TNH, k_TKH = self.rope.forward(
            self.each_q_norm.forward(q_TNH), self.each_k_norm.forward(k_TKH), positions_T
        )
        return q_TNH, k_TKH, v_TKH


class NormedHeadsBlock(ParallelBlock):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.attention.attend = NormedHeads(at, self.attention.attend)
