"""GLM-4.5 and the families with its mixture in all but their first layers: a router of sigmoids
with a correction, and experts that every token takes.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from minisgl.models.blocks.mixture import MoeSpec
from minisgl.models.config import ModelConfig
from minisgl.models.families.layer_types import FULL, SLIDING, types_in_config
from minisgl.models.spec import Family, LayerSpec, ModelSpec
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.blocks.layer_kinds import layer_types, layers_of_types, no_rotation, plain, refuse
from minisgl_zoo.blocks.routers import CORRECTION, sigmoid_mixture
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.view import CheckpointView


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


def without_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Leave out the layers of multi-token prediction, which follow the last layer."""
    for index in range(config.fields.integer("num_nextn_predict_layers", 1, minimum=0)):
        view.drop(f"model.layers.{config.num_layers + index}.")
    return view


def afmoe(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    refuse(fields, "attention_bias", "biases of attention are not supported")
    types = layer_types(config, fields.integer("global_attn_every_n_layers", 4))
    scale = config.hidden_size**0.5 if fields.flag("mup_enabled", False) else 1.0
    return plain(
        config,
        layers=partial(
            layers_of_types, types=types, ropes={FULL: no_rotation(config)}, block=AfmoeBlock
        ),
        moe=sigmoid_mixture,
        qk_norm=True,
        decoder=partial(ScaledDecoder, embedding_scale=scale),
    )


def split_qkv(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = ("q_proj", "k_proj", "v_proj")
    view = without_drafts(view, config)
    return view.split("query_key_value", parts, (q_rows, kv_rows, kv_rows))


def dots1_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    first = config.fields.integer("max_window_layers", 62, minimum=0)
    if config.fields.optional_integer("sliding_window") is None:
        first = config.num_layers
    types = types_in_config(config, (FULL, SLIDING)) or tuple(
        SLIDING if index >= first else FULL for index in range(config.num_layers)
    )
    return layers_of_types(config, types)


def dots1_mixture(config: ModelConfig) -> MoeSpec:
    moe = sigmoid_mixture(config)
    # Unlike GLM's, the field has no default.
    num_shared = config.fields.integer("n_shared_experts", minimum=0)
    return replace(moe, shared_size=num_shared * moe.inner_size)


def hy_v3(config: ModelConfig) -> ModelSpec:
    refuse(config.fields, "mlp_bias", "biases of MLPs are not supported")
    return plain(config, moe=sigmoid_mixture, qk_norm=True)


GLM4MOE = Family(
    spec=partial(plain, moe=sigmoid_mixture, o_bias=False, qk_norm="use_qk_norm"),
    view=without_drafts,
    defaults={
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
)
AFMOE = Family(
    spec=afmoe,
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
BAILINGMOEV2 = Family(
    spec=partial(
        plain,
        moe=sigmoid_mixture,
        qkv_bias="use_qkv_bias",
        o_bias="use_bias",
        qk_norm="use_qk_norm",
    ),
    view=split_qkv,
    renames={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    names={
        ".word_embeddings.": ".embed_tokens.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.",
        ".attention.": ".self_attn.",
        ".mlp.gate.expert_bias": f".mlp.gate.{CORRECTION}",
    },
    defaults={
        "use_qk_norm": True,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 512,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 0,
        "rope_theta": 600_000.0,
        "max_position_embeddings": 32_768,
    },
)
DOTS1 = Family(
    spec=partial(plain, layers=dots1_layers, moe=dots1_mixture, qk_norm=True),
    defaults={
        "num_key_value_heads": 32,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
    },
)
HYV3 = Family(
    spec=hy_v3,
    view=without_drafts,
    renames={
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    names={
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.expert_bias": f".mlp.gate.{CORRECTION}",
        f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    },
    defaults={
        "n_routed_experts": 192,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 2.826,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "max_position_embeddings": 131_072,
    },
)
SOLAROPEN = replace(
    GLM4MOE,
    defaults={
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1280,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131_072,
    },
)
