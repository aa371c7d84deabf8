"""Tiny configs of the families with recurrent layers, in the form of `dense_cases`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

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
FULL, LINEAR = "full_attention", "linear_attention"

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
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, {**DELTA, **EXPERTS}, 4, False),
    "qwen3-next-moe": (Qwen3NextConfig, {**DELTA, **EXPERTS, "mlp_only_layers": [1]}, 4, True),
    "qwen3-next-moe-6-heads-stacked": (
        Qwen3NextConfig,
        {**DELTA, **EXPERTS, "linear_num_value_heads": 6, "norm_topk_prob": False},
        16,
        False,
    ),
}
