"""CWM (Code World Model): a Llama with windows in three of four layers; the first has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import FULL, SLIDING
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    types = layer_types(config)
    if config.fields.values.get("layer_types") is None:
        types = tuple(SLIDING if index % 4 else FULL for index in range(config.num_layers))
    return ModelSpec(
        config=config,
        layers=layers_of_types(config, types),
        mlp_bias=config.fields.flag("mlp_bias", False),
    )


FAMILY = Family(
    architectures=("CwmForCausalLM",),
    spec=spec,
    defaults={
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
)
