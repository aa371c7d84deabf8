"""Falcon-H1: Mamba2 and attention side by side after one norm, with constant factors everywhere.

Both have a cache, so a layer of the file is two layers of the spec: `SidePlace` has Mamba2's cache,
and `SideBlock` after it computes both.

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.layers import BaseOP
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.config import ModelConfig
from minisgl.models.spec import CacheLayout, Family, ModelSpec, layers_of
from minisgl_zoo.blocks.mamba2 import Mamba2, as_mamba, mamba_sizes
from minisgl_zoo.blocks.sandwich import NoNorm
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.blocks.views import ScaledView
from minisgl_zoo.rotations import positive_numbers
from minisgl_zoo.view import CheckpointView


class SidePlace(Block):
    """Holds the place of the next block's Mamba2 in the cache. `forward` returns its arguments."""

    def __init__(self, at: LayerBuild) -> None:
        BaseOP.__init__(self)

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return x_TD, residual_TD  # type: ignore[return-value] # None before the first norm


class SideBlock(Block):
    """norm; Mamba2 and attention side by side, whose sum is added; norm, MLP."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        before = at.index - 1
        place = CacheLayout.of(at.spec.layers).places[before]
        self.mamba = Mamba2(replace(at, layer=at.spec.layers[before], place=place), module="mamba")
        self.no_norm = NoNorm()

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_norm.forward(x_TD, residual_TD)
        if rows_S is not None:
            residual_TD = self.attention_norm.rows(residual_TD, rows_S, len(x_TD))
        mixed, _ = self.mamba.forward(self.no_norm, x_TD, None, batch, rows_S)
        attended, _ = self.attention.forward(self.no_norm, x_TD, None, batch, rows_S)
        return self.mlp.forward(self.mlp_norm, mixed + attended, residual_TD)


def scaled_tensors(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Return the view whose tensors have taken their factors. Raises ConfigError."""
    fields = config.fields

    def numbers(name: str, count: int) -> tuple[float, ...]:
        is_absent = fields.values.get(name) is None
        return (1.0,) * count if is_absent else positive_numbers(fields, name, count)

    attend, key = (fields.number(f"{x}_multiplier", 1.0) for x in ("attention_in", "key"))
    gate, down = numbers("mlp_multipliers", 2)
    factors = {
        ".q_proj.weight": attend,
        ".k_proj.weight": attend * key,
        ".k_proj.bias": key,
        ".v_proj.weight": attend,
    }
    outputs = {
        ".o_proj": fields.number("attention_out_multiplier", 1.0),
        ".mamba.out_proj": fields.number("ssm_out_multiplier", 1.0),
        ".gate_proj": gate,
        ".down_proj": down,
    }
    factors |= {f"{end}.{x}": y for end, y in outputs.items() for x in ("weight", "bias")}
    num_heads, head_dim, num_groups, state_size = mamba_sizes(config)
    inner, groups = num_heads * head_dim, num_groups * state_size
    counts = torch.tensor([inner, inner, groups, groups, num_heads])  # of z, x, B, C and dt
    rows = torch.tensor(numbers("ssm_multipliers", 5)).repeat_interleave(counts)
    scaled = rows * fields.number("ssm_in_multiplier", 1.0)
    in_rows = {".mamba.in_proj.weight": scaled, ".mamba.in_proj.bias": rows}
    return ScaledView(view, factors, in_rows)


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    norm = "before" if fields.flag("mamba_norm_before_gate", True) else "after"
    mamba = {
        "norm": norm if fields.flag("mamba_rms_norm", False) else None,
        "out_bias": fields.flag("projectors_bias", False),
    }
    pairs = [
        (as_mamba(config, layer, SidePlace, **mamba), replace(layer, block=SideBlock))
        for layer in layers_of(config)
    ]
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=tuple(layer for pair in pairs for layer in pair),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        decoder=partial(
            ScaledDecoder,
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=fields.number("lm_head_multiplier", 1.0),
        ),
    )


NAMES = {
    "model.final_layernorm.": "model.norm.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
    ".mamba.norm.": ".mamba.gated_norm.",
}


FALCONH1 = Family(
    spec=spec,
    names=NAMES,
    view=scaled_tensors,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
    },
)
