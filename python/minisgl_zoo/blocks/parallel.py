"""A block whose attention and MLP read the same input, the output of one layer norm; in Command R+
each head of queries and keys has a layer norm, too.

Axes: T tokens of this step, S rows that sample, D hidden size, N query heads, K key/value heads, H
head dim (heads are local to the rank).
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from minisgl.core import Batch
from minisgl.layers.base import BaseOP
from minisgl.layers.norm import RMSNormFused
from minisgl.layers.shard import split_heads
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.quantization import Part
from minisgl_zoo.blocks.attention import SplitAttentionLayer
from minisgl_zoo.blocks.sandwich import NoNorm


class LayerNormFused(RMSNormFused):
    """All-reduce x, add the residual, then layer norm (Ba et al. 2016) without a bias."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.comm.all_reduce(x)
        residual = x if residual is None else x + residual
        return F.layer_norm(residual, residual.shape[-1:], self.weight, None, self.eps), residual


class ParallelBlock(Block):
    """norm; attention and MLP side by side; their sum is added to the residual."""

    norm_type: ClassVar[type[RMSNormFused]] = LayerNormFused

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.mlp_norm = NoNorm()

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_norm.forward(x_TD, residual_TD)
        if rows_S is not None:
            residual_TD = self.attention_norm.rows(residual_TD, rows_S, len(x_TD))
        attended, x_TD = self.attention.forward(self.mlp_norm, x_TD, None, batch, rows_S)
        return attended + self.mlp.forward(self.mlp_norm, x_TD, None)[0], residual_TD


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


class NormedHeadsBlock(ParallelBlock):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        layer, comm = at.layer, at.build.comm
        own = split_heads(layer.num_heads, layer.num_kv_heads, comm.size)[comm.rank]
        self.attention.attend = SplitAttentionLayer(
            self.attention.attend.layer,
            rope=at.rope,
            q_norm=HeadLayerNorm(at, heads=own.q, num_heads=layer.num_heads, name="q_norm"),
            k_norm=HeadLayerNorm(at, heads=own.kv, num_heads=layer.num_kv_heads, name="k_norm"),
        )
