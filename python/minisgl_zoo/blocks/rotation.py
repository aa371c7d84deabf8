"""Rotary embeddings that few families have: stretched (RoPE scaling), none, or by type of layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.config import Fields
from minisgl.models.families.layer_types import SLIDING
from minisgl.models.loading.rotation import rotary_config

if TYPE_CHECKING:
    from minisgl.layers.frequencies import RotaryConfig
    from minisgl.models.config import ModelConfig


def rope_fields(config: ModelConfig) -> Fields:
    """Return the object of config.json that describes the rotation."""
    values = config.fields.values
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return Fields(given, f"{config.fields.where}: the settings of the rotation")


def no_rotation(config: ModelConfig) -> RotaryConfig:
    """Return the `RotaryConfig` of layers that do not rotate (NoPE)."""
    return replace(config.rope, rope_type="none")


def sliding_rope(config: ModelConfig, theta: float) -> RotaryConfig:
    """Return the rotation of SLIDING layers: that of their own object in config.json. Without such
    an object it has the base `theta` and is not stretched."""
    if isinstance(rope_fields(config).values.get(SLIDING), dict):
        return rotary_config(config.fields, config.head_dim, SLIDING)
    return replace(config.rope, rope_type="default", theta=theta, factor=1.0)
