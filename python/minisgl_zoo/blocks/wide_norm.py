"""Norms of queries and keys over all heads together, also those of other ranks.

Axes: T tokens, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.layers.base import BaseOP, Identity
from minisgl.layers.shard import split_heads, times
from minisgl.models.decoder import Attention, Block
from minisgl.quantization import Part
from minisgl_zoo.layers.split_attention import SplitAttentionLayer

if TYPE_CHECKING:
    from minisgl.attention import AttnLayer
    from minisgl.layers import BuildContext, RotaryEmbedding
    from minisgl.models.decoder import LayerBuild


class WideNorm(BaseOP):
    """RMS norm over the heads of all ranks. This rank has `heads`.

    num_copies: how many ranks have the same heads; each adds that part of their sum of squares.
    """

    weight: Tensor

    def __init__(
        self,
        build: BuildContext,
        *,
        heads: range,
        num_heads: int,
        num_copies: int,
        head_dim: int,
        eps: float,
        name: str,
    ) -> None:
        super().__init__()
        self.comm, self.eps = build.comm, eps
        self.part_of_mean = 1 / (num_copies * num_heads * head_dim)
        part = Part(name=name, shape=(num_heads * head_dim,), axis=0, share=times(heads, head_dim))
        self.declare("weight", build.dtype, part)

    def forward(self, x_TNH: Tensor) -> Tensor:
        x32_TNH = x_TNH.float()
        mean_T = self.comm.all_reduce(x32_TNH.square().sum((1, 2)) * self.part_of_mean)
        normed_TNH = x32_TNH * torch.rsqrt(mean_T + self.eps)[:, None, None]
        return (self.weight.view(x_TNH.shape[1:]) * normed_TNH).to(x_TNH.dtype)


class WideNormLayer(SplitAttentionLayer):
    def __init__(
        self, layer: AttnLayer, rope: RotaryEmbedding, q_norm: WideNorm, k_norm: WideNorm
    ) -> None:
        super().__init__(layer, rope=rope, q_norm=Identity(), k_norm=Identity())
        self.wide_q_norm, self.wide_k_norm = q_norm, k_norm

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = (
            x.view(len(x), -1, self.layer.head_dim) for x in torch.split(qkv, self.sizes, dim=1)
        )
        q_TNH, k_TKH = self.rope.forward(
            self.wide_q_norm.forward(q_TNH), self.wide_k_norm.forward(k_TKH), positions_T
        )
        return q_TNH, k_TKH, v_TKH


class WideNormAttention(Attention):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        build, layer = at.build, at.layer
        shares = split_heads(layer.num_heads, layer.num_kv_heads, build.comm.size)
        own = shares[build.comm.rank]

        def norm(name: str, heads: range, num_heads: int, num_copies: int) -> WideNorm:
            return WideNorm(
                build,
                heads=heads,
                num_heads=num_heads,
                num_copies=num_copies,
                head_dim=layer.head_dim,
                eps=at.spec.config.norm_eps,
                name=f"{layer.prefix}.self_attn.{name}.weight",
            )

        num_copies = sum(share.kv == own.kv for share in shares)
        self.attend = WideNormLayer(
            self.attend.layer,
            at.rope,
            norm("q_norm", own.q, layer.num_heads, 1),
            norm("k_norm", own.kv, layer.num_kv_heads, num_copies),
        )


class WideNormBlock(Block):
    attention_type = WideNormAttention
