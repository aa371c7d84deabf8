"""SmolLM3: a Llama in which every fourth layer does not rotate (NoPE)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families.dense import qwen_window
from minisgl.models.families.layer_types import FULL, SLIDING, windows
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.layer_types import layer_types
from minisgl_zoo.blocks.rotation import no_rotation

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    rotates = fields.values.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        rotates = [int((index + 1) % interval != 0) for index in range(config.num_layers)]
    if (
        type(rotates) is not list
        or len(rotates) < config.num_layers
        or any(rotate not in (0, 1) for rotate in rotates)
    ):
        raise fields.error("no_rope_layers", f"a list of {config.num_layers} zeros and ones")
    window = qwen_window(config)
    types = layer_types(config)
    if fields.values.get("layer_types") is None and window is not None:
        types = tuple(FULL if rotate else SLIDING for rotate in rotates[: config.num_layers])
    none = no_rotation(config)
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=tuple(
            replace(layer, rope=config.rope if rotate else none)
            for layer, rotate in zip(
                layers_of(config, windows(config, types, window)), rotates, strict=False
            )
        ),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = Family(
    architectures=("SmolLM3ForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
)
