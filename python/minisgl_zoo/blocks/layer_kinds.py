"""Layers that differ in windows, rotations and mixtures, as config.json says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minisgl.layers.rotary import RotaryConfig
from minisgl.models.config import Fields, ModelConfig
from minisgl.models.families.dense import FULL, SLIDING, types_in_config, windows
from minisgl.models.loading.rotation import rotary_config
from minisgl.models.spec import LayerSpec, layers_of
from minisgl_zoo.rotations import NoRotation


def refuse(fields: Fields, name: str, why: str) -> None:
    """Raise ConfigError if the flag is true."""
    if fields.flag(name, False):
        raise fields.error(name, f"false: {why}")


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
    ropes: Mapping[str, RotaryConfig] | None = None,
    **fields: Any,
) -> tuple[LayerSpec, ...]:
    """Return the layers of these types. SLIDING layers have the window of the field
    `sliding_window`. ropes: the rotation of some types; others have `config.rope`. fields: see
    `layers_of`."""
    window = config.fields.optional_integer("sliding_window")
    layers = layers_of(config, windows(config, types, window), **fields)
    return with_ropes(layers, [(ropes or {}).get(kind, config.rope) for kind in types])


def with_ropes(layers: Sequence[LayerSpec], ropes: Sequence[RotaryConfig]) -> tuple[LayerSpec, ...]:
    """Return the layers, each with its own rotation."""
    return tuple(replace(layer, rope=rope) for layer, rope in zip(layers, ropes, strict=True))


def sparse_layers(config: ModelConfig, num_dense: int = 0) -> tuple[bool, ...]:
    """Return for each layer whether it has the mixture, as the field `mlp_layer_types` says.

    num_dense: without that field, the first `num_dense` layers have an MLP. Raises ConfigError.
    """
    fields, count = config.fields, config.num_layers
    types = fields.values.get("mlp_layer_types")
    if types is None:
        return tuple(index >= num_dense for index in range(count))
    kinds = ("dense", "sparse")
    if type(types) is not list or len(types) != count or any(kind not in kinds for kind in types):
        raise fields.error("mlp_layer_types", f"a list of {count}, each dense or sparse")
    return tuple(kind == "sparse" for kind in types)


def rope_fields(config: ModelConfig) -> Fields:
    """Return the object of config.json that describes the rotation."""
    values = config.fields.values
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return Fields(given, f"{config.fields.where}: the settings of the rotation")


def no_rotation(config: ModelConfig) -> RotaryConfig:
    """Return the `RotaryConfig` of layers that do not rotate (NoPE)."""
    rope = config.rope
    return NoRotation(
        rope_type="none",
        theta=rope.theta,
        rotary_dim=rope.rotary_dim,
        max_position=rope.max_position,
        original_max_position=rope.original_max_position,
    )


def default_rope(rope: RotaryConfig, theta: float) -> RotaryConfig:
    """Return a rotation of the same dims with the base `theta`, which is not stretched."""
    return RotaryConfig(
        theta=theta,
        rotary_dim=rope.rotary_dim,
        max_position=rope.max_position,
        original_max_position=rope.original_max_position,
    )


def sliding_rope(config: ModelConfig, theta: float) -> RotaryConfig:
    """Return the rotation of SLIDING layers: that of their own object in config.json. Without such
    an object it has the base `theta` and is not stretched."""
    if isinstance(rope_fields(config).values.get(SLIDING), dict):
        return rotary_config(config.fields, config.head_dim, SLIDING)
    return default_rope(config.rope, theta)
