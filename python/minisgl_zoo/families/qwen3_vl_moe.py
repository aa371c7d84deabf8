"""Qwen3-VL (mixtures, text): Qwen3-MoE; in the files an expert's matrices are transposed."""

from __future__ import annotations

from dataclasses import replace

from minisgl.models.families.mixtures import QWEN3_MOE
from minisgl_zoo.blocks.views import TransposedExperts

FAMILY = replace(
    QWEN3_MOE,
    architectures=("Qwen3VLMoeTextForCausalLM",),
    view=TransposedExperts.of,
    defaults={
        **QWEN3_MOE.defaults,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128_000,
    },
)
