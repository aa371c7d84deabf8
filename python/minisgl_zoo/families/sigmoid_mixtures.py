"""GLM-4.5 and the families with its mixture in all but their first layers: a router of sigmoids
with a correction, and experts that every token takes. ERNIE 4.5's router has softmax instead, and
MiniMax-M2 norms queries and keys over all heads, half of which rotate.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from minisgl.layers.moe import ExpertNames
from minisgl.models.blocks.mixture import MoeSpec, expert_names, mixture_in_each_layer
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import FULL, SLIDING, plain, types_in_config
from minisgl.models.spec import Family, LayerSpec, ModelSpec, layers_of
from minisgl_zoo.blocks.attention import WideNormBlock
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.blocks.layer_kinds import layer_types, layers_of_types, no_rotation, refuse
from minisgl_zoo.blocks.next_tokens import predicting
from minisgl_zoo.blocks.routers import CORRECTION, SigmoidExperts, sigmoid_mixture
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.blocks.views import interleaved_heads
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
    """Leave out the layers of multi-token prediction, which follow the last layer. The first one
    stays if it is asked for, without what it shares with the model."""
    if config.mtp:
        view.need(f"model.layers.{config.num_layers}.", "--drafts mtp")
        for shared in ("embed_tokens", "shared_head.head"):
            view.drop(f"model.layers.{config.num_layers}.{shared}.")
    count = config.fields.integer("num_nextn_predict_layers", 1, minimum=0)
    for index in range(config.mtp, count):
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
    spec=predicting(partial(plain, moe=sigmoid_mixture, o_bias=False, qk_norm="use_qk_norm")),
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


class ErnieExperts(SigmoidExperts):
    """An expert's weight is its probability."""

    sum_eps = 1e-12
    correction_rows = (1,)

    def weights(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1)


def ernie4_5_moe(config: ModelConfig) -> ModelSpec:
    fields, count = config.fields, config.num_layers
    mixture = sigmoid_mixture(
        config, experts="num_experts", shared="moe_num_shared_experts", layer=ErnieExperts
    )
    first = fields.integer("moe_layer_start_index", minimum=0)
    last = fields.integer("moe_layer_end_index", minimum=-1)
    every = fields.integer("moe_layer_interval")
    if fields.number("moe_norm_min", 1e-12) > 1e-6:
        raise fields.error("moe_norm_min", "at most 0.000001, which bounds no sum of weights")
    refuse(fields, "use_bias", "mixtures of ERNIE 4.5 with biases are not served")
    last = count - 1 if last == -1 else last
    is_sparse = tuple(first <= i <= last and (i + 1) % every == 0 for i in range(count))
    mixture = replace(mixture, is_sparse=is_sparse, renormalise=True)
    return ModelSpec(config=config, layers=layers_of(config), moe=mixture)


def without_ernie_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Leave out multi-token prediction, and put the heads' entries in order."""
    view.drop("model.mtp_")
    return interleaved_heads(view, config)


ERNIE4_5_MOE = Family(
    spec=ernie4_5_moe,
    view=without_ernie_drafts,
    renames={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    names={".mlp.moe_statics.": ".mlp.gate.", ".mlp.gate.moe_statics.": ".mlp.gate."},
    defaults={
        "num_key_value_heads": 4,
        "intermediate_size": 12_288,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
)


def minimax_m2(config: ModelConfig) -> ModelSpec:
    # Released files say how many dims rotate.
    rotary_dim = config.fields.integer("rotary_dim", config.rope.rotary_dim)
    if rotary_dim > config.head_dim or rotary_dim % 2:
        raise config.fields.error("rotary_dim", f"an even number up to {config.head_dim}")
    rope = replace(config.rope, rotary_dim=rotary_dim)
    return ModelSpec(
        config=config,
        layers=layers_of(config, rope=rope, block=WideNormBlock),
        moe=mixture_in_each_layer(
            config, minimax_names, layer=partial(SigmoidExperts, config=config)
        ),
    )


def minimax_names(layer: int) -> ExpertNames:
    return expert_names(f"model.layers.{layer}.mlp", projections=("w1", "w3", "w2"))


MINIMAXM2 = Family(
    spec=minimax_m2,
    names={".block_sparse_moe.": ".mlp.", f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
        "max_position_embeddings": 196_608,
    },
)
