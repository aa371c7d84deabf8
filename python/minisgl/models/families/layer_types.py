"""Which layers of a model attend within a window: `layer_types` in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.spec import layers_of

if TYPE_CHECKING:
    from minisgl.layers.frequencies import RotaryConfig
    from minisgl.models.blocks.decoder import Block
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import LayerSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(config: ModelConfig, period: int | None = None) -> tuple[str, ...]:
    """Return FULL or SLIDING for each layer. Raises ConfigError for other types.

    period: if config.json has no `layer_types`, every period-th layer is FULL and the others are
    SLIDING; None makes all layers FULL.
    """
    return types_in_config(config, (FULL, SLIDING)) or tuple(
        SLIDING if period and (index + 1) % period else FULL for index in range(config.num_layers)
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


def layers_of_types(
    config: ModelConfig,
    types: Sequence[str],
    *,
    ropes: Sequence[RotaryConfig] | None = None,
    block: type[Block] | None = None,
    scale: float | None = None,
) -> tuple[LayerSpec, ...]:
    """Return the layers of these types. SLIDING layers have the window of the field
    `sliding_window`. ropes: each layer's rotation; None is `config.rope` for all."""
    window = config.fields.optional_integer("sliding_window")
    layers = layers_of(config, windows(config, types, window), block=block, scale=scale)
    if ropes is None:
        return layers
    return tuple(replace(layer, rope=rope) for layer, rope in zip(layers, ropes, strict=True))
