"""Model shapes that benchmarks fill with random weights: values of a config.json."""

from __future__ import annotations

from typing import Any, Final

from minisgl_bench.floor import Shape

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
_QWEN3_6: dict[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "vocab_size": 248_320,
    "rope_theta": 10_000_000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "vocab_size": 262_144,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        **_QWEN3,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "torch_dtype": "float32",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 17_408,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25_600,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    # The sizes of openai/gpt-oss-20b's config.json.
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201_088,
        "rope_theta": 150_000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    # As large as Qwen3.6-27B and Qwen3.6-35B-A3B: their states are 151 and 63 MB.
    "qwen3.6-27b": {
        **_QWEN3_6,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
    },
    "qwen3.6-35b-a3b": {
        **_QWEN3_6,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    # As large as Gemma 4's 31B and 26B-A4B (30.7 and 25.2 billion parameters).
    "gemma-4-31b": {
        **_GEMMA4,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "gemma-4-26b-a4b": {
        **_GEMMA4,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}


QUANTISED = {"fp8": (1.0, 2.0), "int8": (1.0, 1.0), "int4": (0.5, 1.0)}
"""For each `--quantization`: (bytes per weight without scales, rate of its GEMMs over bf16's)."""
MXFP4_BYTES = 17 / 32


def shape_of(
    values: dict[str, Any], quantization: str | None = None, kv_itemsize: int = 2
) -> Shape:
    """Return the sizes that `floor_s` needs. In a mixture every layer is sparse."""
    num_experts = values.get("num_experts", values.get("num_local_experts", 0))
    weight_bytes, flops_factor = QUANTISED[quantization] if quantization else (2.0, 1.0)
    extra: dict[str, Any] = {"weight_bytes": weight_bytes, "expert_bytes": weight_bytes}
    if "quantization_config" in values:
        extra["expert_bytes"] = MXFP4_BYTES
    if "global_head_dim" in values:
        extra |= _windows(values, kv_itemsize)
        values = values | _wide(values)
    elif "sliding_window" in values:
        half = values["num_hidden_layers"] // 2
        heads = 2 * (values["num_attention_heads"] + values["num_key_value_heads"])
        extra |= {
            "attention_layers": half,
            **_window(values, half, kv_itemsize),
            "mixer_params": half * values["hidden_size"] * heads * values["head_dim"],
        }
    if "linear_num_value_heads" in values:
        extra |= _hybrid(values)
    return Shape(
        **extra,
        kv_itemsize=kv_itemsize,
        flops_factor=flops_factor,
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        intermediate_size=values.get("moe_intermediate_size") or values["intermediate_size"],
        num_experts=num_experts,
        top_k=values["num_experts_per_tok"] if num_experts else 0,
        vocab_size=values["vocab_size"],
    )


GEMMA4_PERIOD = 6  # of six layers the last one has no window


def _wide(values: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of Gemma 4's layers without a window."""
    return {
        "head_dim": values["global_head_dim"],
        "num_key_value_heads": values["num_global_key_value_heads"],
    }


def _window(values: dict[str, Any], num_layers: int, itemsize: int) -> dict[str, int]:
    """Return the fields of so many layers with a window."""
    size = num_layers * values["head_dim"]
    return {
        "window": values["sliding_window"],
        "window_kv_bytes": 2 * size * values["num_key_value_heads"] * itemsize,
        "window_flops": 4 * size * values["num_attention_heads"],
    }


def _windows(values: dict[str, Any], kv_itemsize: int) -> dict[str, Any]:
    """Return Gemma 4's fields: layers with a window have other heads; elsewhere keys are values."""
    num_layers, hidden_size = values["num_hidden_layers"], values["hidden_size"]
    wide = num_layers // GEMMA4_PERIOD
    heads = 2 * (values["num_attention_heads"] + values["num_key_value_heads"])
    with_window = (num_layers - wide) * heads * values["head_dim"]
    values_of_wide = wide * values["num_global_key_value_heads"] * values["global_head_dim"]
    return {
        "attention_layers": wide,
        **_window(values, num_layers - wide, kv_itemsize),
        "mixer_params": hidden_size * (with_window - values_of_wide),
        "shared_size": values["intermediate_size"],
    }


def _hybrid(values: dict[str, Any]) -> dict[str, Any]:
    """Return a hybrid's fields: three of four layers are gated delta nets, the fourth is attention
    with an output gate."""
    num_layers = values["num_hidden_layers"]
    linear = num_layers - num_layers // values["full_attention_interval"]
    k_heads, v_heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    k_dim, v_dim = values["linear_key_head_dim"], values["linear_value_head_dim"]
    inputs = 2 * k_heads * k_dim + 2 * v_heads * v_dim + 2 * v_heads  # q, k; v, z; beta, decay
    return {
        "attention_layers": num_layers - linear,
        "q_heads_factor": 2,
        "mixer_params": linear * values["hidden_size"] * (inputs + v_heads * v_dim),
        "state_bytes": linear * v_heads * k_dim * v_dim * 4,
        "shared_size": values.get("shared_expert_intermediate_size", 0),
    }
