"""Qwen2 and Qwen2.5: biases on q, k and v; some layers may attend within a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    return ModelSpec(config=config, layers=layers_of(config, qwen_windows(config)), qkv_bias=True)


def qwen_window(config: ModelConfig) -> int | None:
    """Return the window of the layers that have one; None unless `use_sliding_window` is true."""
    is_used = config.fields.flag("use_sliding_window", False)
    return config.fields.optional_integer("sliding_window") if is_used else None


def qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return each layer's window: as the field `layer_types` says, or else the layers from
    `max_window_layers` on have it."""
    fields, window = config.fields, qwen_window(config)
    if fields.values.get("layer_types") is None:
        first = fields.integer("max_window_layers", minimum=0)
        return tuple(window if i >= first else None for i in range(config.num_layers))
    from minisgl.models.families.layer_types import layer_types, windows

    return windows(config, layer_types(config), window)


FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    spec=spec,
    defaults={"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
)
