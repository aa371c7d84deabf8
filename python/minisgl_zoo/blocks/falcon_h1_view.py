"""Falcon-H1's constant factors, which the tensors take while they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.models.loading.rotation import positive_numbers
from minisgl_zoo.blocks.mamba2 import mamba_sizes
from minisgl_zoo.blocks.views import ScaledView

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl_zoo.view import CheckpointView


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
