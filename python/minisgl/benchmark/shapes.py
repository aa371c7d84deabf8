"""The model shapes that benchmarks fill with random weights: values of a config.json."""

from __future__ import annotations

from typing import Any, Final

from minisgl.benchmark.floor import Shape

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
}


def shape_of(values: dict[str, Any]) -> Shape:
    """Return the sizes that `floor_s` needs. In a mixture every layer is sparse."""
    num_experts = values.get("num_experts", 0)
    return Shape(
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        intermediate_size=values["moe_intermediate_size" if num_experts else "intermediate_size"],
        num_experts=num_experts,
        top_k=values["num_experts_per_tok"] if num_experts else 0,
        vocab_size=values["vocab_size"],
    )
