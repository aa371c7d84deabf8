"""Which layers of a model attend within a window, and which have a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import FULL, SLIDING, types_in_config, windows
from minisgl.models.spec import LayerSpec, layers_of

if TYPE_CHECKING:
    from minisgl.layers.frequencies import RotaryConfig
    from minisgl.models.blocks.decoder import Block
    from minisgl.models.config import ModelConfig


def layer_types(config: ModelConfig, period: int | None = None) -> tuple[str, ...]:
    """Return FULL or SLIDING for each layer. Raises ConfigError for other types.

    period: if config.json has no `layer_types`, every period-th layer is FULL and the others are
    SLIDING; None makes all layers FULL.
    """
    return types_in_config(config, (FULL, SLIDING)) or tuple(
        SLIDING if period and (index + 1) % period else FULL for index in range(config.num_layers)
    )


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


def sparse_layers(config: ModelConfig, num_dense: int = 0) -> tuple[bool, ...]:
    """Return for each layer whether it has the mixture, as the field `mlp_layer_types` says.

    num_dense: without that field, the first `num_dense` layers have an MLP. Raises ConfigError.
    """
    fields, count = config.fields, config.num_layers
    types = fields.values.get("mlp_layer_types")
    if types is None:
        return tuple(index >= num_dense for index in range(count))
    if type(types) is not list or len(types) != count or not {*types} <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"a list of {count}, each dense or sparse")
    return tuple(kind == "sparse" for kind in types)
