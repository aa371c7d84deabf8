"""Llama, Mistral, Qwen2 and Qwen3: models whose layers all have an MLP.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import FULL, SLIDING, types_in_config, windows
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def _llama(config: ModelConfig) -> ModelSpec:
    """No norms on heads, no window, biases where config.json asks for them."""
    attention_bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of(config),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.fields.flag("mlp_bias", False),
    )


def mistral(config: ModelConfig) -> ModelSpec:
    """A Llama without biases, whose layers all attend within a window (unless it is null)."""
    window = config.fields.optional_integer("sliding_window")
    return ModelSpec(config=config, layers=layers_of(config, (window,) * config.num_layers))


def _qwen2(config: ModelConfig) -> ModelSpec:
    """Biases on q, k and v; some layers may attend within a window."""
    return ModelSpec(config=config, layers=layers_of(config, qwen_windows(config)), qkv_bias=True)


def qwen3(config: ModelConfig) -> ModelSpec:
    """Queries and keys are normed per head; windows as in Qwen2."""
    attention_bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of(config, qwen_windows(config)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


def qwen_window(config: ModelConfig) -> int | None:
    """Return the window of the layers that have one; None unless `use_sliding_window` is true."""
    is_used = config.fields.flag("use_sliding_window", False)
    return config.fields.optional_integer("sliding_window") if is_used else None


def qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return each layer's window: as the field `layer_types` says, or else the layers from
    `max_window_layers` on have it."""
    window = qwen_window(config)
    if types := types_in_config(config, (FULL, SLIDING)):
        return windows(config, types, window)
    first = config.fields.integer("max_window_layers", minimum=0)
    return tuple(window if i >= first else None for i in range(config.num_layers))


QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}

LLAMA = Family(architectures=("LlamaForCausalLM",), spec=_llama)
MISTRAL = Family(
    architectures=("MistralForCausalLM",),
    spec=mistral,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    spec=_qwen2,
    defaults={**QWEN_WINDOW, "num_key_value_heads": 32},
)
QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    spec=qwen3,
    defaults={**QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128},
)
