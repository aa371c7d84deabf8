"""Llama, Mistral, Qwen2 and Qwen3: models whose layers all have an MLP.

`plain` is the spec of every family that differs from Llama in values only.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from minisgl.models.registry import get_model_class
from minisgl.models.spec import Family, LayerSpec, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.blocks.mixture import MoeSpec
    from minisgl.models.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def plain(
    config: ModelConfig,
    *,
    layers: Callable[[ModelConfig], tuple[LayerSpec, ...]] = layers_of,
    moe: Callable[[ModelConfig], MoeSpec | None] | None = None,
    qkv_bias: str | bool = "attention_bias",
    o_bias: str | bool = "attention_bias",
    mlp_bias: str | bool = False,
    qk_norm: str | bool = False,
    **fields: Any,
) -> ModelSpec:
    """Return the spec of these layers and this mixture. qkv_bias, o_bias, mlp_bias, qk_norm: the
    value, or the name of a flag in config.json, which is false unless the family's defaults say
    otherwise. fields: further fields of `ModelSpec`."""
    defaults = get_model_class(config.architecture).defaults

    def flag(name: str | bool) -> bool:
        if isinstance(name, bool):
            return name
        return config.fields.flag(name, defaults.get(name, False))

    return ModelSpec(
        config=config,
        layers=layers(config),
        moe=moe(config) if moe else None,
        qkv_bias=flag(qkv_bias),
        o_bias=flag(o_bias),
        mlp_bias=flag(mlp_bias),
        qk_norm=flag(qk_norm),
        **fields,
    )


def types_in_config(config: ModelConfig, kinds: Sequence[str]) -> tuple[str, ...] | None:
    """Return the field `layer_types`, or None if it is absent. Raises ConfigError unless it has one
    of `kinds` for each layer."""
    types = config.fields.values.get("layer_types")
    if types is None:
        return None
    if type(types) is not list or len(types) != config.num_layers:
        raise config.fields.error("layer_types", f"a list of {config.num_layers}")
    if any(kind not in kinds for kind in types):
        raise config.fields.error("layer_types", f"a list of {' and '.join(kinds)}")
    return tuple(types)


def windows(
    config: ModelConfig, types: Sequence[str], window: int | None
) -> tuple[int | None, ...]:
    """Return each layer's window. Raises ConfigError if there are SLIDING layers but no window."""
    if window is None and SLIDING in types:
        raise config.fields.error("layer_types", "full_attention for all, as there is no window")
    return tuple(window if kind == SLIDING else None for kind in types)


def windowed_layers(config: ModelConfig, **fields: Any) -> tuple[LayerSpec, ...]:
    """Return layers that all have the window of the field `sliding_window`, unless it is null.
    fields: see `layers_of`."""
    window = config.fields.optional_integer("sliding_window")
    return layers_of(config, (window,) * config.num_layers, **fields)


def qwen_window(config: ModelConfig) -> int | None:
    """Return the window of the layers that have one; None unless `use_sliding_window` is true."""
    is_used = config.fields.flag("use_sliding_window", False)
    return config.fields.optional_integer("sliding_window") if is_used else None


def qwen_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return layers with the windows that the field `layer_types` says, or else the layers from
    `max_window_layers` on have the window."""
    window = qwen_window(config)
    if types := types_in_config(config, (FULL, SLIDING)):
        return layers_of(config, windows(config, types, window))
    first = config.fields.integer("max_window_layers", minimum=0)
    return layers_of(config, [window if i >= first else None for i in range(config.num_layers)])


QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}

LLAMA = Family(spec=partial(plain, mlp_bias="mlp_bias"))

mistral = partial(plain, layers=windowed_layers, qkv_bias=False, o_bias=False)

MISTRAL = Family(
    spec=mistral,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
QWEN2 = Family(
    spec=partial(plain, layers=qwen_layers, qkv_bias=True, o_bias=False),
    defaults={**QWEN_WINDOW, "num_key_value_heads": 32},
)
QWEN3 = Family(
    spec=partial(plain, layers=qwen_layers, qk_norm=True),
    defaults={**QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128},
)
