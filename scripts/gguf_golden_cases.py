"""The small models of `gguf_golden.py`: names of transformers' config classes, and their fields."""

from __future__ import annotations

from typing import Any, Final

VOCAB: Final = 96
FULL, NEAR, CONV, LINEAR = "full_attention", "sliding_attention", "conv", "linear_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5e4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
THETA = {"rope_theta": 5e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 8.0,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 9,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_hidden_layers": 3,
    "layer_types": [NEAR, FULL, FULL],
    "rope_parameters": {
        NEAR: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, **THETA},
    },
}
GRANITE4 = {
    **MULTIPLIERS,
    "layer_types": [LINEAR, FULL, LINEAR],
    "num_hidden_layers": 3,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "position_embedding_type": "nope",
}
FALCON = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "head_dim": 16,
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
NEMOTRON = {
    "layers_block_type": [LINEAR, "mlp", LINEAR, FULL, "mlp", LINEAR],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 16,
    "chunk_size": 8,
}
MIXTURE = {
    **NEMOTRON,
    "layers_block_type": [LINEAR, "moe", LINEAR, FULL, "moe"],
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
PARTLY = {"rope_type": "default", **THETA, "partial_rotary_factor": 0.5}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.2, 2.9],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
    **THETA,
}
LATENTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2": ("Glm4MoeLiteConfig", LATENTS),
    "deepseek2-yarn": (
        "DeepseekV3Config",
        {
            **LATENTS,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {
                **YARN,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.8,
                "mscale_all_dim": 0.8,
            },
        },
    ),
    "deepseek2-v2": (
        "DeepseekV2Config",
        {
            **LATENTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.0,
            "rope_parameters": {
                **YARN,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "llama": ("LlamaConfig", {}),
    "mixtral": ("MixtralConfig", LOCAL),
    "mistral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1e4}),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4-shared": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "num_hidden_layers": 4,
            "layer_types": [NEAR, FULL, NEAR, FULL],
        },
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None, "original_max_position_embeddings": 128}),
    "phi3-longrope": (
        "Phi3Config",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": [CONV, FULL, CONV],
            "num_hidden_layers": 3,
            "block_multiple_of": 8,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2moe": (
        "Lfm2MoeConfig",
        {
            **EXPERTS,
            "num_dense_layers": 1,
            "layer_types": [CONV, FULL, CONV],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    "granite": ("GraniteConfig", MULTIPLIERS),
    "granitemoe": ("GraniteMoeConfig", {**MULTIPLIERS, **LOCAL}),
    "granitehybrid": ("GraniteMoeHybridConfig", {**GRANITE4, **LOCAL}),
    "granitehybrid-dense": ("GraniteMoeHybridConfig", {**GRANITE4, "num_local_experts": 0}),
    "granitehybrid-attention": (
        "GraniteMoeHybridConfig",
        {**GRANITE4, **LOCAL, "layer_types": [FULL] * 3, "position_embedding_type": "rope"},
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": {
                FULL: {**YARN, "attention_factor": 1.1386294361119891},
                NEAR: {"rope_type": "default", **THETA},
            },
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "glm": ("GlmConfig", {"head_dim": 8, "rope_theta": 1e4, "rms_norm_eps": 1e-5}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "dots1": (
        "Dots1Config",
        {
            "n_routed_experts": 5,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": True,
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            "num_experts": 5,
            "num_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "route_scale": 1.7,
            "sliding_window": 9,
            "mup_enabled": True,
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {"sliding_window": None, "layer_types": [FULL] * 2},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "command-r": (
        "CohereConfig",
        {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": False},
    ),
    "cohere2": (
        "Cohere2Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "hunyuan-dense": ("HunYuanDenseV1Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "falcon-h1": ("FalconH1Config", FALCON),
    "falcon-h1-norm": (
        "FalconH1Config",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": ("NemotronHConfig", NEMOTRON),
    "nemotron_h_moe": ("NemotronHConfig", MIXTURE),
    "nemotron_h_moe-latent": ("NemotronHConfig", {**MIXTURE, "moe_latent_size": 16}),
    "qwen2moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen3next": (
        "Qwen3NextConfig",
        {
            **EXPERTS,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 40,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "head_dim": 16,
            "num_hidden_layers": 4,
        },
    ),
    "qwen3vl": ("Qwen3Config", {"head_dim": 16}),
    "minimax-m2": ("MiniMaxM2Config", {**LOCAL, "head_dim": 16, "rope_parameters": PARTLY}),
}
