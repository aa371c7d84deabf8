"""Tiny configs of the families with recurrent layers, in the form of `dense_cases`."""

from __future__ import annotations

from typing import Any

from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
EXPERTS = {
    "num_experts": 9,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 40,
}
FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"
SLIDING = "sliding_attention"

LFM2_MOE = {
    "num_experts": 9,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "layer_types": [CONV, FULL, CONV],
    "num_hidden_layers": 3,
}
M, A, MLP = LINEAR, FULL, "mlp"
MAMBA = {
    "layers_block_type": [M, MLP, M, A, MLP, M],
    "mamba_num_heads": 4,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "n_groups": 2,
    "head_dim": 16,
    "chunk_size": 8,
}
FALCON = {
    "mamba_d_ssm": 80,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.6],
    "key_multiplier": 1.3,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 0.8, 0.5, 1.2, 0.9],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
}
MIXTURE = {
    **MAMBA,
    "layers_block_type": [M, "moe", M, A, "moe", M, MLP],
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
GRANITE4 = {
    "layer_types": [M, A, M],
    "num_hidden_layers": 3,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 8.0,
}
HYBRID_CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], int, bool]] = {
    "qwen3.5": (Qwen3_5TextConfig, DELTA, 4, False),
    "qwen3.5-own-heads-tied": (
        Qwen3_5TextConfig,
        {
            **DELTA,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
            "layer_types": [FULL, LINEAR, LINEAR],
            "num_hidden_layers": 3,
        },
        1,
        True,
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        {**DELTA, **EXPERTS, "linear_key_head_dim": 16},
        4,
        False,
    ),
    "qwen3-next-moe": (Qwen3NextConfig, {**DELTA, **EXPERTS, "mlp_only_layers": [1]}, 4, True),
    "qwen3-next-moe-6-heads-stacked": (
        Qwen3NextConfig,
        {**DELTA, **EXPERTS, "linear_num_value_heads": 6, "norm_topk_prob": False},
        16,
        False,
    ),
    "lfm2": (
        Lfm2Config,
        {"layer_types": [CONV, CONV, FULL, CONV], "num_hidden_layers": 4, "block_multiple_of": 8},
        4,
        False,
    ),
    "lfm2-bias-untied-old": (
        Lfm2Config,
        {
            "full_attn_idxs": [1],
            "num_hidden_layers": 3,
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
        1,
        True,
    ),
    "lfm2-moe": (Lfm2MoeConfig, LFM2_MOE, 4, False),
    "lfm2-moe-stacked": (
        Lfm2MoeConfig,
        {**LFM2_MOE, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
        16,
        False,
    ),
    "lfm3": (
        Lfm3Config,
        {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 9},
        4,
        False,
    ),
    "lfm3-bias-untied-stacked": (
        Lfm3Config,
        {
            "layer_types": [SLIDING, CONV, FULL],
            "num_hidden_layers": 3,
            "head_dim": 12,
            "sliding_window": 13,
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
        1,
        False,
    ),
    "lfm3-neither-gates-nor-norms": (
        Lfm3Config,
        {
            "layer_types": [CONV, FULL, SLIDING],
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 9,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
        },
        16,
        False,
    ),
    "falcon-h1": (FalconH1Config, FALCON, 4, False),
    "falcon-h1-norm-after": (
        FalconH1Config,
        {
            **FALCON,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
        16,
        False,
    ),
    "falcon-h1-norm-first-tied": (
        FalconH1Config,
        {
            **FALCON,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_d_conv": 2,
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
        },
        1,
        True,
    ),
    "granite4-moe": (
        GraniteMoeHybridConfig,
        {**GRANITE4, "num_local_experts": 5, "num_experts_per_tok": 3},
        4,
        False,
    ),
    "granite4-moe-rotating-stacked": (
        GraniteMoeHybridConfig,
        {
            **GRANITE4,
            "num_local_experts": 4,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        16,
        False,
    ),
    "granite4-dense-old": (
        GraniteMoeHybridConfig,
        {
            **GRANITE4,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": [FULL] * 3,
        },
        1,
        True,
    ),
    "nemotron-h": (NemotronHConfig, MAMBA, 4, False),
    "nemotron-3": (NemotronHConfig, MIXTURE, 4, False),
    "nemotron-3-latent-stacked": (
        NemotronHConfig,
        {
            **MIXTURE,
            "n_routed_experts": 8,
            "moe_latent_size": 32,
            "norm_topk_prob": False,
            "n_group": 4,
            "topk_group": 2,
        },
        16,
        False,
    ),
    "nemotron-h-biases": (
        NemotronHConfig,
        {
            **MAMBA,
            "layers_block_type": [A, MLP, M],
            "mamba_num_heads": 6,
            "n_groups": 3,
            "conv_kernel": 2,
            "use_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        16,
        False,
    ),
}
