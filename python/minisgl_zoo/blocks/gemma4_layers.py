"""The layers of Gemma 4: the heads of each, and whose keys and values it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.config import Fields
from minisgl.models.families.layer_types import FULL
from minisgl.models.loading.rotation import rotary_config
from minisgl_zoo.blocks.gemma4_block import Gemma4Block
from minisgl_zoo.blocks.layer_types import layers_of_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import LayerSpec


def gemma4_layers(config: ModelConfig, types: Sequence[str], num_own: int) -> tuple[LayerSpec, ...]:
    """Return the layers of these types. The first `num_own` have keys and values of their own. A
    later one reads those of the last of these layers that has its type. Raises ConfigError."""
    layers = layers_of_types(config, types, block=Gemma4Block, scale=1.0)
    return tuple(_layer(config, types, index, layer, num_own) for index, layer in enumerate(layers))


def _layer(
    config: ModelConfig, types: Sequence[str], index: int, layer: LayerSpec, num_own: int
) -> LayerSpec:
    fields, kind = config.fields, types[index]
    head_dim, num_kv_heads = layer.head_dim, layer.num_kv_heads
    if kind == FULL:
        head_dim = fields.integer("global_head_dim", 512)
        if fields.flag("attention_k_eq_v", False):
            num_kv_heads = fields.integer("num_global_key_value_heads", num_kv_heads)
    each = fields.values.get("per_layer_config") or {}  # from transformers 5.23 on
    own = each.get(str(index)) if isinstance(each, dict) else each
    if own is not None:
        if not isinstance(own, dict):
            raise fields.error("per_layer_config", "an object of objects, by the layer's number")
        sizes = Fields(own, f"{fields.where}: per_layer_config.{index}")
        head_dim = sizes.integer("head_dim", layer.head_dim)
        num_kv_heads = sizes.integer("num_key_value_heads", layer.num_kv_heads)
    shares = None
    if index >= num_own:
        shares = max(i for i in range(num_own) if types[i] == kind)
    rope = rotary_config(fields, head_dim, kind)
    return replace(layer, head_dim=head_dim, num_kv_heads=num_kv_heads, rope=rope, shares=shares)
