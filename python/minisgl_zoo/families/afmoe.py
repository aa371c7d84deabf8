"""AFMoE (Trinity Nano, Trinity Mini): Gemma 2's order of norms; attention's output has a gate; only
the layers with a window rotate; all but the first layers have GLM-4.5's mixture."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import SLIDING
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types
from minisgl_zoo.blocks.rotation import no_rotation
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.families import glm4_moe
from minisgl_zoo.families.minimax_m2 import CORRECTION

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


class AfmoeAttention(GatedAttention):
    gate_name = "gate_proj"


class AfmoeBlock(SandwichBlock):
    attention_type = AfmoeAttention
    norm_names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    )


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias", "false: biases of attention are not supported")
    types = layer_types(config, fields.integer("global_attn_every_n_layers", 4))
    none = no_rotation(config)
    ropes = [config.rope if kind == SLIDING else none for kind in types]
    scale = config.hidden_size**0.5 if fields.flag("mup_enabled", False) else 1.0
    return ModelSpec(
        config=config,
        layers=layers_of_types(config, types, ropes=ropes, block=AfmoeBlock),
        qk_norm=True,
        moe=glm4_moe.sigmoid_mixture(config),
        decoder=partial(ScaledDecoder, embedding_scale=scale),
    )


FAMILY = Family(
    architectures=("AfmoeForCausalLM",),
    spec=spec,
    renames={
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_dense_layers": "first_k_dense_replace",
        "route_scale": "routed_scaling_factor",
    },
    names={".mlp.router.gate.": ".mlp.gate.", ".mlp.expert_bias": f".mlp.gate.{CORRECTION}"},
    defaults={
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16_384,
        "sliding_window": 1024,
    },
)
