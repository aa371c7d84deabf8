"""Muse-Glimmer (text): Gemma 2's order of norms; embedding, queries and keys are normed without a
weight; attention's output has a gate; layers without a window do not rotate."""

from __future__ import annotations

from torch import Tensor

from minisgl.layers import BuildContext, RMSNorm
from minisgl.layers.attention import AttentionLayer
from minisgl.models.blocks.decoder import LayerBuild
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import FULL, SLIDING
from minisgl.models.spec import Family, LayerSpec, ModelSpec
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.blocks.gemma import GemmaNorm, UnitNorm
from minisgl_zoo.blocks.layer_kinds import (
    layer_types,
    layers_of_types,
    no_rotation,
    refuse,
    with_ropes,
)
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.blocks.scaled import ScaledDecoder


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


def spec(config: ModelConfig) -> ModelSpec:
    fields, count = config.fields, config.num_layers
    refuse(fields, "attention_bias", "biases of attention are not supported")
    # The last layer is full, and every fourth one before it.
    full = [(count - 1 - index) % 4 == 0 for index in range(count)]
    types = layer_types(config)
    if fields.values.get("layer_types") is None:
        types = tuple(FULL if is_full else SLIDING for is_full in full)
    thetas = fields.values.get("layer_rope_theta") or [not is_full for is_full in full]
    if type(thetas) is not list or len(thetas) != count:
        raise fields.error("layer_rope_theta", f"a list of {count}")
    none = no_rotation(config)
    scale = fields.number("qk_scale_factor", 3.87) * config.head_dim**-0.5
    layers = layers_of_types(config, types, block=MuseGlimmerBlock, scale=scale)
    ropes = [config.rope if theta else none for theta in thetas]
    return ModelSpec(config=config, layers=with_ropes(layers, ropes), decoder=MuseGlimmerDecoder)


MUSEGLIMMER = Family(
    spec=spec,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 2048,
    },
    renames={"hidden_activation": "hidden_act"},
)
