"""Muse-Glimmer's block and decoder.

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.layers import RMSNorm
from minisgl.layers.attention import AttentionLayer
from minisgl.layers.linear import Linear
from minisgl.layers.shard import split_heads, times
from minisgl.models.decoder import Attention
from minisgl.models.gemma import GemmaNorm
from minisgl.models.gemma4_attention import UnitNorm
from minisgl.models.post_norm import SandwichBlock
from minisgl.models.scaled import ScaledDecoder
from minisgl.quantization import Part

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.layers import BuildContext, RMSNormFused
    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import LayerSpec, ModelSpec


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate.

    One GEMM computes queries, keys, values and the gate. Queries and keys are normed without a
    weight.
    """

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        layer, config = at.layer, at.spec.config
        heads = split_heads(layer.num_heads, layer.num_kv_heads, at.build.comm.size)
        own = heads[at.build.comm.rank]

        def rows(name: str, total: int, share: range) -> Part:
            return Part(
                name=f"{layer.prefix}.self_attn.{name}_proj.weight",
                shape=(total * layer.head_dim, config.hidden_size),
                axis=0,
                share=times(share, layer.head_dim),
            )

        kv = [rows(name, layer.num_kv_heads, own.kv) for name in "kv"]
        queries, gates = (rows(name, layer.num_heads, own.q) for name in ("q", "gate"))
        self.width = (len(own.q) + 2 * len(own.kv)) * layer.head_dim
        self.gated_qkv = Linear(at.build, queries, *kv, gates, bias=False)
        del self.qkv
        norms = [UnitNorm(at.build, size=layer.head_dim, eps=config.norm_eps) for _ in range(2)]
        self.attend = AttentionLayer(
            self.attend.layer, rope=at.rope, q_norm=norms[0], k_norm=norms[1]
        )

    def forward(
        self,
        norm: RMSNormFused,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        projected, residual_TD = self.gated_qkv.forward_normed(norm, x_TD, residual_TD)
        qkv, gate = projected.tensor_split([self.width], dim=-1)
        attended = self.attend.forward(qkv.contiguous(), batch)
        if rows_S is not None:
            residual_TD = norm.rows(residual_TD, rows_S, len(attended))
            attended, gate = attended[rows_S], gate[rows_S]
        return self.out.forward(attended * torch.sigmoid(gate)), residual_TD


class MuseGlimmerBlock(SandwichBlock):
    attention_type = GatedAttention
    rms_norm_type, final_norm_type = GemmaNorm, RMSNorm
    whole_embedding = True

    @classmethod
    def post_norm(
        cls, spec: ModelSpec, build: BuildContext, layer: LayerSpec, name: str
    ) -> RMSNorm:
        norm = super().post_norm(spec, build, layer, name)
        norm.eps = spec.config.fields.number("post_norm_eps", 1e-8)
        return norm


class MuseGlimmerDecoder(ScaledDecoder):
    def __init__(self, spec: ModelSpec, build: BuildContext, num_positions: int) -> None:
        fields, config = spec.config.fields, spec.config
        scale = fields.number("output_multiplier", 0.19611613513818404)
        softcap = fields.number("final_logit_softcapping", 20.0)
        super().__init__(spec, build, num_positions, logit_scale=scale, softcap=softcap)
        self.embedding_norm = UnitNorm(build, size=config.hidden_size, eps=config.norm_eps)

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.embedding_norm.forward(self.comm.all_reduce(super().embed(ids_T)))
