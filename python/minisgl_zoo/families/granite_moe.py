"""Granite 3 (granitemoe): Granite with a mixture in each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.blocks.mixture import expert_names, mixture_in_each_layer
from minisgl_zoo.families import granite

if TYPE_CHECKING:
    from minisgl.layers.moe import ExpertNames
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import ModelSpec


def spec(config: ModelConfig) -> ModelSpec:
    return replace(granite.spec(config), moe=mixture_in_each_layer(config, granite_names))


def granite_names(layer: int) -> ExpertNames:
    """Return the names in released files, which have one tensor for all experts."""
    prefix = f"model.layers.{layer}.block_sparse_moe"
    return replace(
        expert_names(prefix, router="router.layer"),
        all_gate_up=f"{prefix}.input_linear.weight",
        all_down=f"{prefix}.output_linear.weight",
    )


NAMES = {
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
}
"""Parts of names as transformers 5 writes them -> as in released files."""


FAMILY = replace(
    granite.FAMILY,
    architectures=("GraniteMoeForCausalLM",),
    spec=spec,
    names=NAMES,
    defaults={
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
