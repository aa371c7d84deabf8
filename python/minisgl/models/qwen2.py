"""Qwen2 and Qwen2.5: biases on q, k and v; some layers may attend within a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    return ModelSpec(config=config, layers=layers_of(config, qwen_windows(config)), qkv_bias=True)


def qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """`layer_types` where given; else the layers from `max_window_layers` on have the window."""
    fields = config.fields
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window")
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", minimum=0)
        return tuple(window if i >= first else None for i in range(config.num_layers))
    known = ("full_attention", "sliding_attention")
    if type(types) is not list or len(types) != config.num_layers:
        raise fields.error("layer_types", f"a list of {config.num_layers}")
    if any(kind not in known for kind in types):
        raise fields.error("layer_types", f"a list of {' and '.join(known)}")
    if window is None and "sliding_attention" in types:
        raise fields.error("layer_types", "only full_attention while no sliding window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    spec=spec,
    defaults={"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
)
