"""Attention with a step that few families have: norms over all heads together, sinks, or queries
that are scaled by their position.

The backends' `forward_qkv` norms, rotates and stores in one kernel, if the norm is RMSNorm. A
`SplitAttentionLayer` has any norm and rotates in plain torch, and the backend gets q, k and v.

Axes: T tokens, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minisgl.attention import AttnLayer
from minisgl.core import Batch
from minisgl.layers import RotaryEmbedding
from minisgl.layers.attention import AttentionLayer
from minisgl.layers.base import BaseOP, BuildContext, Identity
from minisgl.layers.shard import split_heads, times
from minisgl.models.blocks.decoder import Attention, Block, LayerBuild
from minisgl.models.spec import LayerSpec
from minisgl.quantization import Part


class SplitAttentionLayer(AttentionLayer):
    def forward(self, qkv: Tensor, batch: Batch) -> Tensor:
        view = batch.pools[self.layer.pool]
        q_TNH, k_TKH, v_TKH = self.split(qkv, view.positions)
        attended: Tensor = view.context.attn.forward(q_TNH, k_TKH, v_TKH, self.layer, view)
        return attended.flatten(1)


class WideNorm(BaseOP):
    """RMS norm over the heads of all ranks. This rank has `heads`.

    num_copies: how many ranks have the same heads; each adds that part of their sum of squares.
    """

    weight: Tensor

    def __init__(
        self, at: LayerBuild, name: str, heads: range, num_heads: int, num_copies: int
    ) -> None:
        super().__init__()
        head_dim = at.layer.head_dim
        self.comm, self.eps = at.build.comm, at.spec.config.norm_eps
        self.part_of_mean = 1 / (num_copies * num_heads * head_dim)
        name, size = f"{at.layer.prefix}.self_attn.{name}.weight", num_heads * head_dim
        part = Part(name=name, shape=(size,), axis=0, share=times(heads, head_dim))
        self.declare("weight", at.build.dtype, part)

    def forward(self, x_TNH: Tensor) -> Tensor:
        x32_TNH = x_TNH.float()
        mean_T = self.comm.all_reduce(x32_TNH.square().sum((1, 2)) * self.part_of_mean)
        normed_TNH = x32_TNH * torch.rsqrt(mean_T + self.eps)[:, None, None]
        return (self.weight.view(x_TNH.shape[1:]) * normed_TNH).to(x_TNH.dtype)


class WideNormAttention(Attention):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        build, layer = at.build, at.layer
        shares = split_heads(layer.num_heads, layer.num_kv_heads, build.comm.size)
        own = shares[build.comm.rank]
        num_copies = sum(share.kv == own.kv for share in shares)
        self.attend = SplitAttentionLayer(
            self.attend.layer,
            rope=at.rope,
            q_norm=WideNorm(at, "q_norm", own.q, layer.num_heads, 1),
            k_norm=WideNorm(at, "k_norm", own.kv, layer.num_kv_heads, num_copies),
        )


class WideNormBlock(Block):
    attention_type = WideNormAttention


class HeadSinks(BaseOP):
    """The sinks of this rank's query heads."""

    weight: Tensor

    def __init__(self, build: BuildContext, layer: LayerSpec) -> None:
        super().__init__()
        heads = split_heads(layer.num_heads, layer.num_kv_heads, build.comm.size)[build.comm.rank]
        name, shape = f"{layer.prefix}.self_attn.sinks", (layer.num_heads,)
        self.declare("weight", torch.float32, Part(name=name, shape=shape, axis=0, share=heads.q))


class SinkAttention(Attention):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.sinks = HeadSinks(at.build, at.layer)
        self.attend.layer = replace(self.attend.layer, sinks=self.sinks)


def position_scale(positions_T: Tensor, beta: float, length: int) -> Tensor:
    """Return 1 + beta * log(1 + floor(p / length)) for each position p, [T, 1, 1] in float32."""
    return (1 + beta * torch.log1p((positions_T // length).float()))[:, None, None]


class ScaledQueries(SplitAttentionLayer):
    """Queries are multiplied by the `position_scale` of their position."""

    def __init__(self, layer: AttnLayer, rope: RotaryEmbedding, beta: float) -> None:
        super().__init__(layer, rope=rope, q_norm=Identity(), k_norm=Identity())
        self.beta = beta

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = super().split(qkv, positions_T)
        scale = position_scale(positions_T, self.beta, self.rope.config.original_max_position)
        return q_TNH * scale.to(q_TNH.dtype), k_TKH, v_TKH
