"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the others, a mixture in
most."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.hybrid import DEFAULTS, hybrid_layers
from minisgl_zoo.families import qwen3_5_moe
from minisgl_zoo.families.qwen3_5_moe import MIXTURE
from minisgl_zoo.view import text_only

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    return replace(qwen3_5_moe.spec(config), layers=hybrid_layers(config, fused=True))


FAMILY = Family(
    architectures=("Qwen3NextForCausalLM",),
    spec=spec,
    defaults={**DEFAULTS, **MIXTURE, "num_experts": 512, "num_experts_per_tok": 10},
    view=text_only,
)
