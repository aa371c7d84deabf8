"""Qwen3.5-MoE and Qwen3.6-MoE (text): Qwen3.5 with a mixture in every layer, and an expert that
every token takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families.mixtures import qwen_mixture
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.hybrid import DEFAULTS
from minisgl_zoo.families import qwen3_5
from minisgl_zoo.view import text_only

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    shared_size = config.fields.integer("shared_expert_intermediate_size")
    return replace(qwen3_5.spec(config), moe=qwen_mixture(config, shared_size))


MIXTURE = {
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}

FAMILY = Family(
    architectures=("Qwen3_5MoeForCausalLM",),
    spec=spec,
    defaults={**DEFAULTS, **MIXTURE, "num_experts": 256, "num_experts_per_tok": 8},
    view=text_only,
)
