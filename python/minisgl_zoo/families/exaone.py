"""EXAONE 4 and K-EXAONE: norms on heads; if some layers have a window, only those rotate."""

from __future__ import annotations

from functools import partial
from typing import Any

from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import FULL, plain
from minisgl.models.spec import Family, LayerSpec, layers_of
from minisgl_zoo.blocks.layer_kinds import layer_types, layers_of_types, no_rotation
from minisgl_zoo.blocks.routers import CORRECTION, sigmoid_mixture
from minisgl_zoo.blocks.sandwich import PostNormBlock


def exaone_layers(config: ModelConfig, **options: Any) -> tuple[LayerSpec, ...]:
    """options: see `layers_of`."""
    fields = config.fields
    if fields.optional_integer("sliding_window") is None:
        return layers_of(config, **options)
    # The files of the 32B spell the period out as LLLG: three local layers, one global.
    pattern = fields.values.get("sliding_window_pattern")
    period = 4 if pattern == "LLLG" else fields.integer("sliding_window_pattern", 4)
    types = layer_types(config, period)
    return layers_of_types(config, types, {FULL: no_rotation(config)}, **options)


exaone = partial(plain, qkv_bias=False, o_bias=False, qk_norm=True)

EXAONE4 = Family(
    spec=partial(exaone, layers=partial(exaone_layers, block=PostNormBlock)),
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
    },
)
EXAONEMOE = Family(
    spec=partial(
        exaone,
        layers=exaone_layers,
        moe=partial(sigmoid_mixture, experts="num_experts", shared="num_shared_experts"),
    ),
    names={f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}"},
    defaults={
        **EXAONE4.defaults,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
)
