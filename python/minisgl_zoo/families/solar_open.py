"""Solar Open: GLM-4.5's mixture in each layer, and Llama's attention."""

from __future__ import annotations

from dataclasses import replace

from minisgl_zoo.families import glm4_moe

FAMILY = replace(
    glm4_moe.FAMILY,
    architectures=("SolarOpenForCausalLM",),
    defaults={
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1280,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131_072,
    },
)
