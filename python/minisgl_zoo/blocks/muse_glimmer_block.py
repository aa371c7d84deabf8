"""Muse-Glimmer's block and decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.layers import RMSNorm
from minisgl.layers.attention import AttentionLayer
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.blocks.gemma4_attention import UnitNorm
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.families.gemma import GemmaNorm

if TYPE_CHECKING:
    from minisgl.layers import BuildContext
    from minisgl.models.blocks.decoder import LayerBuild
    from minisgl.models.spec import LayerSpec, ModelSpec


class MuseGlimmerAttention(GatedAttention):
    """Queries and keys are normed without a weight."""

    gate_name = "gate_proj"

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        size, eps = at.layer.head_dim, at.spec.config.norm_eps
        q_norm, k_norm = (UnitNorm(at.build, size=size, eps=eps) for _ in range(2))
        layer = self.attend.layer
        self.attend = AttentionLayer(layer, rope=at.rope, q_norm=q_norm, k_norm=k_norm)


class MuseGlimmerBlock(SandwichBlock):
    attention_type = MuseGlimmerAttention
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
