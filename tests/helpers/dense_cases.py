"""Tiny configs of the dense families that differ from Llama in more than a value.

name -> (config class, changes to the common sizes, page size, old spelling of config.json)
"""

from __future__ import annotations

from typing import Any

from transformers import (
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    Ministral3Config,
    MinistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    SeedOssConfig,
    SmolLM3Config,
)

THETA = {"rope_theta": 10_000.0}
PLAIN = {"rope_type": "default", **THETA}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
    **THETA,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA4: dict[str, Any] = {
    "sliding_window": 9,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
}
GRANITE_SWA: dict[str, Any] = {
    "sliding_window": 9,
    "num_hidden_layers": 5,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 8.0,
}
CWM: dict[str, Any] = {"sliding_window": 9, "bos_token_id": 1}
GEMMA = {"sliding_window": 9, "head_dim": 16, "query_pre_attn_scalar": 20}


def long_rope(pairs: int) -> dict[str, Any]:
    """Trained for 16 positions, so that the prompts of the tests need the long factors."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
        "original_max_position_embeddings": 16,
        **THETA,
    }


# transformers counts layers from 1 here: with 4 layers, the third or the last one differs.
DENSE_CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], int, bool]] = {
    "phi3": (Phi3Config, {}, 4, False),
    "phi3-window-old": (Phi3Config, {"sliding_window": 11, "num_key_value_heads": 4}, 1, True),
    "phi3-partial": (
        Phi3Config,
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True},
        4,
        False,
    ),
    "phi3-longrope": (
        Phi3Config,
        {"rope_parameters": long_rope(6), "original_max_position_embeddings": 16},
        4,
        False,
    ),
    "phi4-mini-old": (
        Phi3Config,
        {
            "rope_parameters": {**long_rope(6), "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 16,
            "hidden_size": 64,
            "tie_word_embeddings": True,
        },
        1,
        True,
    ),
    "cwm": (CwmConfig, {**CWM, "head_dim": 16, "num_hidden_layers": 5}, 4, False),
    "cwm-types-old": (
        CwmConfig,
        {
            **CWM,
            "head_dim": 10,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
                **THETA,
            },
        },
        1,
        True,
    ),
    "seed-oss": (SeedOssConfig, {"head_dim": 16}, 4, False),
    "seed-oss-biases": (
        SeedOssConfig,
        {"head_dim": 10, "attention_out_bias": True, "mlp_bias": True, "attention_bias": False},
        1,
        True,
    ),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4}, 4, False),
    "smollm3-window-old": (
        SmolLM3Config,
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        4,
        True,
    ),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
        4,
        False,
    ),
    "granite-biases-old": (
        GraniteConfig,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "residual_multiplier": 0.5,
            "logits_scaling": 3.0,
        },
        1,
        True,
    ),
    "granite-swa": (GraniteSWAConfig, GRANITE_SWA, 4, False),
    "granite-swa-thetas-old": (
        GraniteSWAConfig,
        {
            **GRANITE_SWA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [10_000.0, 0, 500.0],
            "num_hidden_layers": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        1,
        True,
    ),
    "olmo2": (Olmo2Config, {}, 4, False),
    "olmo2-one-kv-head-old": (
        Olmo2Config,
        {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
        1,
        True,
    ),
    "olmo3": (Olmo3Config, {"num_hidden_layers": 4, "sliding_window": 9}, 4, False),
    "olmo3-yarn": (
        Olmo3Config,
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {k: v for k, v in YARN.items() if "beta" not in k},
                "sliding_attention": PLAIN,
            },
        },
        1,
        False,
    ),
    "glm": (GlmConfig, {"head_dim": 16}, 4, False),
    "glm-no-bias-old": (GlmConfig, {"head_dim": 8, "attention_bias": False}, 1, True),
    "glm4": (Glm4Config, {"head_dim": 16}, 4, False),
    "glm4-three-layers-old": (
        Glm4Config,
        {"head_dim": 12, "num_hidden_layers": 3, "attention_bias": False},
        1,
        True,
    ),
    "ernie4.5": (Ernie4_5Config, {"head_dim": 16, "tie_word_embeddings": False}, 4, False),
    "ernie4.5-biases-old": (
        Ernie4_5Config,
        {"head_dim": 10, "use_bias": True, "tie_word_embeddings": True},
        1,
        True,
    ),
    "exaone4": (
        Exaone4Config,
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        4,
        False,
    ),
    "exaone4-window-old": (
        Exaone4Config,
        {"num_hidden_layers": 4, "sliding_window": 9, "head_dim": 16},
        1,
        True,
    ),
    "cohere": (CohereConfig, {"logit_scale": 0.25}, 4, False),
    "cohere-bias-old": (
        CohereConfig,
        {"attention_bias": True, "tie_word_embeddings": False, "layer_norm_eps": 1e-3},
        1,
        True,
    ),
    "cohere-qk-norm": (CohereConfig, {"logit_scale": 0.8333, "use_qk_norm": True}, 4, False),
    "cohere2": (Cohere2Config, {"num_hidden_layers": 4, "sliding_window": 9}, 4, False),
    "cohere2-layer-types-old": (
        Cohere2Config,
        {"sliding_window": 13, "layer_types": ["full_attention", "sliding_attention"]},
        1,
        True,
    ),
    "gemma": (GemmaConfig, {"head_dim": 16}, 4, False),
    "gemma-old": (
        GemmaConfig,
        {"head_dim": 10, "num_key_value_heads": 1, "attention_bias": True},
        1,
        True,
    ),
    "gemma2": (Gemma2Config, {"num_hidden_layers": 3, **GEMMA, **CAPS}, 4, False),
    "gemma2-no-caps-old": (
        Gemma2Config,
        {
            **GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True,
        },
        1,
        True,
    ),
    "gemma4": (Gemma4TextConfig, {**GEMMA4, "attention_k_eq_v": True}, 4, False),
    "gemma4-shared": (
        Gemma4TextConfig,
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 211,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
            "num_hidden_layers": 6,
            "layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"],
        },
        1,
        False,
    ),
    "gemma4-experts": (
        Gemma4TextConfig,
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
        4,
        False,
    ),
    "gemma4-unified": (
        Gemma4UnifiedTextConfig,
        {**GEMMA4, "attention_k_eq_v": True, "final_logit_softcapping": None},
        4,
        False,
    ),
    "gemma3": (Gemma3TextConfig, {"num_hidden_layers": 7, **GEMMA}, 4, False),
    "gemma3-layer-types": (
        Gemma3TextConfig,
        {
            **GEMMA,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": PLAIN,
            },
            "head_dim": 10,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        1,
        False,
    ),
    "hunyuan": (HunYuanDenseV1Config, {"head_dim": 16}, 4, False),
    "hunyuan-alpha-old": (
        HunYuanDenseV1Config,
        {
            "head_dim": 10,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, **THETA},
        },
        1,
        True,
    ),
    "ministral": (
        MinistralConfig,
        {
            "head_dim": 16,
            "sliding_window": 9,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        4,
        False,
    ),
    "ministral-old": (MinistralConfig, {"head_dim": 10, "sliding_window": 13}, 1, True),
    "ministral3": (Ministral3Config, {"head_dim": 16, "rope_parameters": YARN}, 4, False),
    "ministral3-window": (
        Ministral3Config,
        {"head_dim": 10, "rope_parameters": YARN, "sliding_window": 11},
        1,
        False,
    ),
}
