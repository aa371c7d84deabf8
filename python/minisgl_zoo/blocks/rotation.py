"""Rotary embeddings that few families have: stretched (RoPE scaling), none, or by type of layer."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.config import Fields, rotary_config
from minisgl_zoo.blocks.layer_types import SLIDING

if TYPE_CHECKING:
    from minisgl.layers.frequencies import RotaryConfig
    from minisgl.models.config import ModelConfig


def rope_fields(config: ModelConfig) -> Fields:
    """Return the object of config.json that describes the rotation."""
    values = config.fields.values
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return Fields(given, f"{config.fields.where}: the settings of the rotation")


def stretched(read: RotaryConfig, rope: Fields, *, of_a_type: bool) -> RotaryConfig:
    """Return `read` with the fields that its rope type needs. Raises ConfigError.

    of_a_type: whether `rope` is the object of one type of layer. Then `max_position_embeddings`
    counts the positions after stretching.
    """
    llama3 = read.rope_type == "llama3"
    low = rope.number("low_freq_factor", None if llama3 else 1.0)
    high = rope.number("high_freq_factor", None if llama3 else 4.0)
    if low >= high:
        raise rope.error("high_freq_factor", f"above low_freq_factor {low}")
    by_lengths = read.rope_type in ("yarn", "longrope")
    lengths = read.max_position / read.original_max_position if by_lengths else None
    factor = rope.number("factor", 1.0 if read.rope_type == "proportional" else lengths)
    max_position = read.max_position
    if of_a_type and read.rope_type == "linear":
        max_position = max(int(max_position / factor), 1)
    num_pairs = read.rotary_dim // 2 if read.rope_type == "longrope" else 0
    read = replace(
        read,
        max_position=max_position,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        proportion=rope.number("partial_rotary_factor", 1.0),
        short_factor=positive_numbers(rope, "short_factor", num_pairs) if num_pairs else (),
        long_factor=positive_numbers(rope, "long_factor", num_pairs) if num_pairs else (),
    )
    if factor >= 2**31 or read.max_context >= 2**31:
        raise rope.error("factor", "so small that the context is below 2 ** 31 tokens")
    if read.max_context < 1:
        raise rope.error("factor", "so large that the context is at least a token")
    return read


def positive_numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Return the list `name`. Raises ConfigError if it is anything else than `count` positive
    numbers."""
    values = fields.values.get(name)
    if (
        type(values) is not list
        or len(values) != count
        or not all(type(x) in (int, float) and 0 < x <= sys.float_info.max for x in values)
    ):
        raise fields.error(name, f"a list of {count} positive numbers")
    return tuple(map(float, values))


def no_rotation(config: ModelConfig) -> RotaryConfig:
    """Return the `RotaryConfig` of layers that do not rotate (NoPE)."""
    return replace(config.rope, rope_type="none")


def sliding_rope(config: ModelConfig, theta: float) -> RotaryConfig:
    """Return the rotation of SLIDING layers: that of their own object in config.json. Without such
    an object it has the base `theta` and is not stretched."""
    if isinstance(rope_fields(config).values.get(SLIDING), dict):
        return rotary_config(config.fields, config.head_dim, SLIDING)
    return replace(config.rope, rope_type="default", theta=theta, factor=1.0)
