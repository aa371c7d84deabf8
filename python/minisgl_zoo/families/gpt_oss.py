"""gpt-oss: sinks in attention, windows in every other layer, biased experts with a clamped gate."""

from __future__ import annotations

from minisgl.attention.base import SINKS
from minisgl.layers.moe import ExpertNames
from minisgl.models.blocks.decoder import Block
from minisgl.models.blocks.mixture import expert_names, mixture_in_each_layer
from minisgl.models.config import ModelConfig
from minisgl.models.spec import Family, ModelSpec
from minisgl.moe import ClampedGate
from minisgl_zoo.blocks.attention import SinkAttention
from minisgl_zoo.blocks.layer_kinds import layer_types, layers_of_types
from minisgl_zoo.blocks.views import StackedExperts


class GptOssBlock(Block):
    attention_type = SinkAttention


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    bias = fields.flag("attention_bias", True)
    gate = ClampedGate(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    return ModelSpec(
        config=config,
        layers=layers_of_types(config, layer_types(config, period=2), block=GptOssBlock),
        qkv_bias=bias,
        o_bias=bias,
        attention=(SINKS,),
        moe=mixture_in_each_layer(config, _names, activation=gate, bias=True),
    )


def _names(layer: int) -> ExpertNames:
    return expert_names(f"model.layers.{layer}.mlp", router="router")


GPTOSS = Family(
    spec=spec,
    view=StackedExperts.of,
    defaults={
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
)
