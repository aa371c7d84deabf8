"""What some families say of their rotation beside the common fields."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.config import Fields, rotary_config
from minisgl.models.layer_types import SLIDING

if TYPE_CHECKING:
    from minisgl.layers.rotary import RotaryConfig
    from minisgl.models.config import ModelConfig


def rope_fields(config: ModelConfig) -> Fields:
    """Returns the object of config.json that describes the rotation."""
    values = config.fields.values
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return Fields(given, f"{config.fields.where}: the settings of the rotation")


def long_factors(rope: Fields, num_pairs: int) -> dict[str, tuple[float, ...]]:
    """Returns the two lists of longrope. Raises ConfigError for anything but `num_pairs` numbers in
    each."""
    lists = {name: rope.values.get(name) for name in ("short_factor", "long_factor")}
    for name, values in lists.items():
        if (
            type(values) is not list
            or len(values) != num_pairs
            or not all(type(x) in (int, float) and 0 < x <= sys.float_info.max for x in values)
        ):
            raise rope.error(name, f"a list of {num_pairs} positive numbers")
    return {name: tuple(map(float, values or ())) for name, values in lists.items()}


def no_rotation(config: ModelConfig) -> RotaryConfig:
    """Returns the rotation of layers that do not rotate (NoPE)."""
    return replace(config.rope, rope_type="none")


def sliding_rope(config: ModelConfig, theta: float) -> RotaryConfig:
    """Returns the rotation of SLIDING layers: their own object in config.json, or else the one
    without stretching. theta: of the latter."""
    if isinstance(rope_fields(config).values.get(SLIDING), dict):
        return rotary_config(config.fields, config.head_dim, SLIDING)
    return replace(config.rope, rope_type="default", theta=theta, factor=1.0)
