"""The rotary embedding that config.json describes.

Both spellings are read: `rope_theta` with `rope_scaling` (up to transformers 4), and
`rope_parameters` (from 5 on).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.layers.rotary import ROPE_TYPES, RotaryConfig
from minisgl.models.config import Fields

OTHER_ROPE_NAMES = {"mrope": "default"}
"""mrope gives a token three positions, which are equal in text."""


ReadRotation = Callable[[Fields, Fields, int], RotaryConfig]
"""A row of table `rotations`, whose name is a rope type: from config.json, the object in it that
describes the rotation, and the dims of a head. Raises ConfigError."""


def rotary_config(config: Fields, head_dim: int, kind: str | None = None) -> RotaryConfig:
    """Return the rotation that config.json describes. Raises ConfigError.

    kind: a type of layer. If config.json has an object for each type, that of `kind` is read, and
    `max_position_embeddings` counts the positions after stretching. If config.json has both
    `rope_scaling` and `rope_parameters`, the former counts, as in Hugging Face.
    """
    given = config.values.get("rope_scaling") not in (None, {})
    name = "rope_scaling" if given else "rope_parameters"
    values = config.values.get(name)
    values = {} if values is None else values
    if kind is not None and isinstance(values, dict) and isinstance(values.get(kind), dict):
        name, values = f"{name}.{kind}", values[kind]
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.error(name, "one object for all layers")
    rope = Fields(values, f"{config.where}: {name}")
    rope_type = str(values.get("rope_type", values.get("type", "default")))
    rope_type = OTHER_ROPE_NAMES.get(rope_type, rope_type)
    if rope_type in ROPE_TYPES:
        read = unstretched(config, rope, rope_type, head_dim)
        return read if rope_type == "default" else stretched(read, rope, of_a_type=kind is not None)
    other: ReadRotation | None = plugins.find("rotations", rope_type)
    if other is None:
        names = [*ROPE_TYPES, *(row.name for row in plugins.rows("rotations"))]
        more = f"; any other {plugins.absent('rotations')}" if plugins.lacks("rotations") else ""
        raise ConfigError(
            f"{rope.where}: rope type {rope_type!r} is not supported; "
            f"expected one of {', '.join(names)}{more}"
        )
    return other(config, rope, head_dim)


def unstretched(
    config: Fields, rope: Fields, rope_type: str, head_dim: int, rotary_dim: int | None = None
) -> RotaryConfig:
    """Return the fields that every rope type has. Raises ConfigError.

    rope: the object that describes the rotation. rotary_dim: None is `partial_rotary_factor` of
    head_dim.
    """
    if rotary_dim is None:
        partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
        rotary_dim = int(head_dim * min(partial, 2**31))
    lowest = 4 if rope_type == "dynamic" else 2  # its exponent divides by rotary_dim - 2
    if not lowest <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{config.where}: {rotary_dim} of a head's {head_dim} dims would be rotated; "
            f"expected an even number from {lowest} to {head_dim}"
        )
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    if theta <= 1:
        raise ConfigError(f"{config.where}: rope_theta must be above 1, got {theta}")
    max_position = config.integer("max_position_embeddings")
    # A top-level field wins over the one in the object, as in Hugging Face.
    original = config.optional_integer("original_max_position_embeddings")
    original = original or rope.integer("original_max_position_embeddings", max_position)
    return RotaryConfig(
        rope_type=rope_type,
        theta=theta,
        rotary_dim=rotary_dim,
        max_position=max_position,
        original_max_position=original,
    )


def stretched(
    read: RotaryConfig, rope: Fields, *, of_a_type: bool = False, factor: float | None = None
) -> RotaryConfig:
    """Return `read` with the fields that its rope type needs. Raises ConfigError.

    of_a_type: whether `rope` is the object of one type of layer. Then `max_position_embeddings`
    counts the positions after stretching. factor: the value if `rope` has none.
    """
    llama3 = read.rope_type == "llama3"
    low = rope.number("low_freq_factor", None if llama3 else 1.0)
    high = rope.number("high_freq_factor", None if llama3 else 4.0)
    if low >= high:
        raise rope.error("high_freq_factor", f"above low_freq_factor {low}")
    if read.rope_type == "yarn":
        factor = read.max_position / read.original_max_position
    factor = rope.number("factor", factor)
    max_position = read.max_position
    if of_a_type and read.rope_type == "linear":
        max_position = max(int(max_position / factor), 1)
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
    )
    if factor >= 2**31 or read.max_context >= 2**31:
        raise rope.error("factor", "so small that the context is below 2 ** 31 tokens")
    if read.max_context < 1:
        raise rope.error("factor", "so large that the context is at least a token")
    return read
