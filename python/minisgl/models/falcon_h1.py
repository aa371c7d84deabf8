"""Falcon-H1: Mamba2 and attention side by side on one norm, with constant factors everywhere, which
the tensors take while they are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl.models.mamba2 import MambaSpec, check_mamba, mamba_sizes
from minisgl.models.scaled import ScaledDecoder
from minisgl.models.scaled_view import ScaledView
from minisgl.models.side_block import SideBlock, SidePlace
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.view import CheckpointView


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    check_mamba(fields)
    num_heads, head_dim, num_groups, state_size = mamba_sizes(config)
    norm_first = fields.flag("mamba_norm_before_gate", True)
    mamba = MambaSpec(
        value_dim=head_dim,
        taps=fields.integer("mamba_d_conv", minimum=2),
        fused=False,
        bias=fields.flag("mamba_proj_bias", False),
        out_bias=fields.flag("projectors_bias", False),
        norm=("before" if norm_first else "after")
        if fields.flag("mamba_rms_norm", False)
        else None,
    )
    layers = [
        (
            replace(
                layer,
                num_heads=num_heads,
                num_kv_heads=num_groups,
                head_dim=state_size,
                block=SidePlace,
                recurrent=mamba,
            ),
            replace(layer, block=SideBlock),
        )
        for layer in layers_of(config)
    ]
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=tuple(layer for pair in layers for layer in pair),
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


def view(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    fields = config.fields

    def numbers(name: str, count: int) -> list[float]:
        found = fields.values.get(name) or [1.0] * count
        if not isinstance(found, list) or [*map(type, found)] != [float] * count:
            raise fields.error(name, f"a list of {count} numbers")
        return found

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


FAMILY = Family(
    architectures=("FalconH1ForCausalLM",),
    spec=spec,
    names=NAMES,
    view=view,
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
