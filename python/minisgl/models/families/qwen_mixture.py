"""Reads the mixture of experts of Qwen's families and OLMoE from config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.blocks.mixture import MoeSpec, names_in_mlp, read_experts

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def qwen_mixture(config: ModelConfig, shared_size: int = 0) -> MoeSpec:
    """Return the mixture that config.json describes. shared_size: see `MoeSpec`. Raises
    ConfigError."""
    fields = config.fields
    newer = "num_local_experts" in fields.values  # as transformers 5 writes it
    num_experts, top_k = read_experts(config, "num_local_experts" if newer else "num_experts")
    dense = fields.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if type(dense) is not list or any(type(index) is not int for index in dense):
        raise fields.error("mlp_only_layers", "a list of layers' numbers")
    step = fields.integer("decoder_sparse_step", 1)
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=fields.integer("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", False),
        is_sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_layers)),
        names=names_in_mlp,
        shared_size=shared_size,
    )
