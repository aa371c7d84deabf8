"""Which layers of a model attend within a window: `layer_types` in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


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
