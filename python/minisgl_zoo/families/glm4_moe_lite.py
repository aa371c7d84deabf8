"""GLM-4.7-Flash: DeepSeek-V3's attention and mixtures."""

from __future__ import annotations

from dataclasses import replace

from minisgl_zoo.families import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY,
    architectures=("Glm4MoeLiteForCausalLM",),
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 64,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
    },
)
