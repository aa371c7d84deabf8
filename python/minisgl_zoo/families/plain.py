"""Families that differ from Llama in values only: biases, windows, rotations, norms, names.
Ministral 3 also scales its queries by the logarithm of their position (as in Llama 4).

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.blocks.mixture import MoeSpec
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import (
    FULL,
    MISTRAL,
    QWEN2,
    SLIDING,
    plain,
    qwen_window,
    windowed_layers,
    windows,
)
from minisgl.models.families.mixtures import qwen_mixture
from minisgl.models.spec import Family, LayerSpec, layers_of
from minisgl_zoo.blocks.attention import ScaledQueries, WideNormAttention, WideNormBlock
from minisgl_zoo.blocks.layer_kinds import (
    layer_types,
    layers_of_types,
    no_rotation,
    rope_fields,
    sliding_rope,
    with_ropes,
)
from minisgl_zoo.blocks.sandwich import PostNormBlock, SandwichBlock
from minisgl_zoo.blocks.views import interleaved
from minisgl_zoo.view import CheckpointView, fused


class Ministral3Block(Block):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.attention.attend = ScaledQueries(
            self.attention.attend.layer,
            at.rope,
            beta=rope_fields(at.spec.config).number("llama_4_scaling_beta"),
        )


class Olmo2Block(PostNormBlock):
    attention_type = WideNormAttention


class Glm4Block(SandwichBlock):
    norm_names = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


def cwm_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    types = layer_types(config)
    if config.fields.values.get("layer_types") is None:
        types = tuple(SLIDING if index % 4 else FULL for index in range(config.num_layers))
    return layers_of_types(config, types)


def ministral_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    if config.fields.values.get("layer_types") is None:
        return windowed_layers(config)
    return layers_of_types(config, layer_types(config))


def olmo3_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    ropes = {SLIDING: sliding_rope(config, config.rope.theta)}
    return layers_of_types(config, layer_types(config, period=4), ropes, block=Olmo2Block)


def smollm3_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Every fourth layer does not rotate, unless config.json says which."""
    fields, count = config.fields, config.num_layers
    rotates = fields.values.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        rotates = [int((index + 1) % interval != 0) for index in range(count)]
    is_list = type(rotates) is list and len(rotates) >= count
    if not is_list or any(rotate not in (0, 1) for rotate in rotates):
        raise fields.error("no_rope_layers", f"a list of {count} zeros and ones")
    rotates, window = rotates[:count], qwen_window(config)
    types = layer_types(config)
    if fields.values.get("layer_types") is None and window is not None:
        types = tuple(FULL if rotate else SLIDING for rotate in rotates)
    none = no_rotation(config)
    layers = layers_of(config, windows(config, types, window))
    return with_ropes(layers, [config.rope if rotate else none for rotate in rotates])


def olmoe_mixture(config: ModelConfig) -> MoeSpec:
    if config.fields.values.get("clip_qkv") is not None:
        raise config.fields.error("clip_qkv", "null: OLMoE was released without")
    return qwen_mixture(config)


def without_mimo_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Leave out the layers of multi-token prediction."""
    view.drop("model.mtp_layers.")
    return view


def llama_like(defaults: dict[str, Any], **choices: Any) -> Family:
    """Return a family with these defaults. choices: see `plain`."""
    return Family(spec=partial(plain, **choices), defaults=defaults)


CWM = llama_like(
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": 8192,
        "rope_theta": 1e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    layers=cwm_layers,
    qkv_bias=False,
    o_bias=False,
    mlp_bias="mlp_bias",
)
ERNIE4_5 = Family(
    spec=partial(plain, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
    view=interleaved,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
)
glm = partial(plain, o_bias=False)

GLM = Family(
    spec=glm,
    view=interleaved,
    defaults={
        "attention_bias": True,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "max_position_embeddings": 131072,
    },
)
GLM4 = replace(GLM, spec=partial(glm, layers=partial(layers_of, block=Glm4Block)))
INTERNLM3 = llama_like(
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
    },
    qkv_bias="qkv_bias",
    o_bias="bias",
    mlp_bias="bias",
)
MIMO = replace(QWEN2, view=without_mimo_drafts)
MINISTRAL = llama_like(
    dict(MISTRAL.defaults), layers=ministral_layers, qkv_bias=False, o_bias=False
)
MINISTRAL3 = llama_like(
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    layers=partial(windowed_layers, block=Ministral3Block),
    qkv_bias=False,
    o_bias=False,
)
OLMO2 = llama_like(
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    layers=partial(layers_of, block=Olmo2Block),
)
OLMO3 = Family(
    spec=partial(plain, layers=olmo3_layers),
    defaults={**OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500_000.0},
    layer_ropes=True,
)
OLMOE = Family(
    spec=partial(plain, layers=partial(layers_of, block=WideNormBlock), moe=olmoe_mixture),
    defaults={
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 2048,
        "moe_intermediate_size": 2048,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
    renames={"intermediate_size": "moe_intermediate_size"},
)
# The context is the original one (4,096 tokens) unless `--max-seq-len` asks for the long one.
PHI3 = Family(
    spec=partial(plain, layers=windowed_layers, qkv_bias=False, o_bias=False),
    view=fused,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
)
SEEDOSS = llama_like(
    {
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 524288,
    },
    o_bias="attention_out_bias",
    mlp_bias="mlp_bias",
)
SMOLLM3 = llama_like(
    {
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    layers=smollm3_layers,
    mlp_bias="mlp_bias",
)
