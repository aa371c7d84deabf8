"""Granite 4's layers: Mamba2 takes the place of attention in some of Granite's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl_zoo.blocks.mamba2 import as_mamba, letter_of, mixer
from minisgl_zoo.families.granite import GraniteBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.models.blocks.decoder import LayerBuild
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import LayerSpec
    from minisgl_zoo.blocks.mamba2 import Mamba2


class MambaBlock(GraniteBlock):
    @staticmethod
    def attention_type(at: LayerBuild) -> Mamba2:
        return mixer(at, "mamba")


def granite_layers(config: ModelConfig, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return `layers`, those with Mamba2 as the field `layer_types` says. Raises ConfigError."""
    fields, count = config.fields, config.num_layers
    types = fields.values.get("layer_types") or ["mamba"] * count
    kinds = [*map(letter_of, types)] if isinstance(types, list) else []
    if len(kinds) != count or not {*kinds} <= {"M", "*"}:
        raise fields.error("layer_types", f"a list of {count}, each attention or mamba")
    return tuple(
        _mamba(config, layer) if kind == "M" else layer
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _mamba(config: ModelConfig, layer: LayerSpec) -> LayerSpec:
    mamba = as_mamba(
        config, layer, MambaBlock, out_bias=config.fields.flag("mamba_proj_bias", False)
    )
    if mamba.num_kv_heads != 1:
        raise config.fields.error("mamba_n_groups", "1: the norm of this family is over all heads")
    return mamba
