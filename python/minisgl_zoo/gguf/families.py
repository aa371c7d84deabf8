"""The fields of config.json that are particular to each architecture of GGUF files.

Each function turns a file's metadata into fields under Hugging Face's names. Where the metadata has
no key for a field, the value is llama.cpp's constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from minisgl.errors import ConfigError
from minisgl_zoo.gguf.hybrids import falcon_h1, granite_hybrid, lfm2, nemotron_h, qwen35
from minisgl_zoo.gguf.values import (
    Fields,
    GgufValues,
    expert_counts,
    experts,
    grouped_experts,
    layer_types,
    per_layer,
    shared_expert,
)

SOFTMAX: Final = 1
"""A router with softmax has this `expert_gating_func`. Older files of DeepSeek-V2 lack the key."""
RANK: Final = 4
"""A cross-encoder has this `pooling_type`."""
GEMMA2_27B, GEMMA3_27B = 46, 62
"""These are numbers of layers. These sizes scale queries by hidden size / heads, and no key says
so."""


def _plain(file: GgufValues) -> Fields:
    return {"hidden_act": "silu", "attention_bias": file.has("blk.0.attn_q.bias")}


def _llama(file: GgufValues) -> Fields:
    if not file.get("expert_count", 0):
        return _plain(file)
    return {
        "architectures": ["MixtralForCausalLM"],
        **expert_counts(file, "num_local_experts"),
        "sliding_window": None,
    }


def _ministral3(file: GgufValues) -> Fields:
    """Ministral 3 scales queries by their position. A file without the key for that is Mistral
    Small 3."""
    growth = file.get("attention.temperature_scale", None)
    fields: Fields = {"sliding_window": None}
    if growth is None:
        return {**fields, "architectures": ["MistralForCausalLM"]}
    scaling = {**(file.rope_scaling() or {}), "llama_4_scaling_beta": growth}
    return {**fields, "rope_scaling": scaling}


def _qwen_moe(file: GgufValues) -> Fields:
    return {**_plain(file), **experts(file)}


def _qwen2_moe(file: GgufValues) -> Fields:
    return {**_plain(file), **experts(file), **shared_expert(file), "norm_topk_prob": False}


def _olmoe(file: GgufValues) -> Fields:
    return {**_plain(file), **expert_counts(file, "num_experts")}


def _gemma2(file: GgufValues) -> Fields:
    return {
        "sliding_window": file.get("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scale(file, GEMMA2_27B),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufValues) -> Fields:
    return {
        "sliding_window": file.get("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scale(file, GEMMA3_27B),
    }


def _gemma_embedding(file: GgufValues) -> Fields:
    return {**_gemma3(file), "use_bidirectional_attention": True}


def _query_scale(file: GgufValues, largest: int) -> int:
    """Return the number whose square root divides the queries."""
    if file.get("block_count") == largest:
        return int(file.get("embedding_length") // file.get("attention.head_count"))
    return int(file.get("attention.key_length"))


def _gemma4(file: GgufValues) -> Fields:
    types = layer_types(file)
    full = types.index("full_attention")
    kv_heads = per_layer(file, "attention.head_count_kv")
    widths = per_layer(file, "feed_forward_length")
    window_dim = file.get("attention.key_length_swa")
    factors = file.tensors["rope_freqs.weight"].data  # 1 for a pair that rotates, else huge
    fields: Fields = {
        "head_dim": window_dim,
        "global_head_dim": file.get("attention.key_length"),
        "num_key_value_heads": kv_heads[types.index("sliding_attention")],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": not file.has(f"blk.{full}.attn_v.weight"),
        "layer_types": types,
        "sliding_window": file.get("attention.sliding_window"),
        "num_kv_shared_layers": file.get("attention.shared_kv_layers", 0),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": file.get("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": file.get("final_logit_softcapping", None),
        "enable_moe_block": file.get("expert_count", 0) > 0,
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.get("rope.freq_base_swa", 10000.0),
                "partial_rotary_factor": (
                    file.get("rope.dimension_count_swa", window_dim) / window_dim
                ),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": file.get("rope.freq_base"),
                "partial_rotary_factor": float((factors == 1).mean()),
            },
        },
    }
    if file.has("per_layer_token_embd.weight"):
        rows = file.tensors["per_layer_token_embd.weight"].shape[1]
        fields["vocab_size_per_layer_input"] = int(rows)
    if fields["enable_moe_block"]:
        fields |= experts(file)
    return fields


def _gpt_oss(file: GgufValues) -> Fields:
    return {
        "intermediate_size": file.get("expert_feed_forward_length"),
        **expert_counts(file, "num_local_experts"),
        "sliding_window": file.get("attention.sliding_window"),
    }


def _phi3(file: GgufValues) -> Fields:
    original = file.get("rope.scaling.original_context_length", file.get("context_length"))
    fields: Fields = {
        "sliding_window": file.get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
    }
    if file.has("rope_factors_long.weight"):
        fields["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": file.tensors["rope_factors_short.weight"].data.tolist(),
            "long_factor": file.tensors["rope_factors_long.weight"].data.tolist(),
            "attention_factor": file.get("rope.scaling.attn_factor", None),
        }
    return fields


def _granite(file: GgufValues) -> Fields:
    fields: Fields = {
        **_plain(file),
        "embedding_multiplier": file.get("embedding_scale", 1.0),
        "residual_multiplier": file.get("residual_scale", 1.0),
        "attention_multiplier": file.get("attention.scale", 1.0),
        "logits_scaling": file.get("logit_scale", 1.0),
    }
    if file.get("expert_shared_feed_forward_length", 0) or file.arch == "granitehybrid":
        return {**fields, **granite_hybrid(file)}
    if file.arch == "granitemoe":
        fields |= expert_counts(file, "num_local_experts")
    return fields


def _olmo2(file: GgufValues) -> Fields:
    """A file with a window is OLMo 3, whose layers with a window have no rope scaling."""
    window = file.get("attention.sliding_window", 0)
    if not window:
        return _plain(file)
    theta = file.get("rope.freq_base", 10000.0)
    windowed = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", theta)}
    full = {"rope_type": "default", **(file.rope_scaling() or {}), "rope_theta": theta}
    return {
        **_plain(file),
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": layer_types(file),
        "rope_scaling": None,
        "rope_parameters": {"sliding_attention": windowed, "full_attention": full},
    }


def _glm4_moe(file: GgufValues) -> Fields:
    return {
        **_plain(file),
        **grouped_experts(file, num_shared=0),
        "first_k_dense_replace": file.get("leading_dense_block_count", 0),
        "use_qk_norm": file.has("blk.0.attn_q_norm.weight"),
    }


def _dots1(file: GgufValues) -> Fields:
    return {**_glm4_moe(file), "sliding_window": None}


def _afmoe(file: GgufValues) -> Fields:
    return {
        **_glm4_moe(file),
        "sliding_window": file.get("attention.sliding_window"),
        "layer_types": layer_types(file),
        "mup_enabled": True,
    }


def _deepseek2(file: GgufValues) -> Fields:
    """Models with latents. DeepSeek-V2's router has softmax and no correction."""
    num_dense, rotated = file.get("leading_dense_block_count", 0), file.get("rope.dimension_count")
    if not file.has(f"blk.{num_dense}.ffn_gate_inp.weight"):
        raise ConfigError(f"{file.path}: deepseek2 without experts is not supported")
    key_size = file.get("attention.key_length_mla", file.get("attention.key_length"))
    fields: Fields = {
        **grouped_experts(file, num_shared=0),
        "norm_topk_prob": file.get("expert_weights_norm", False),
        "first_k_dense_replace": num_dense,
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": file.get("attention.q_lora_rank", None),
        "kv_lora_rank": file.get("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_size - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": file.get("attention.value_length_mla", file.get("attention.value_length")),
    }
    if over_all := file.get("rope.scaling.yarn_log_multiplier", 0.0):
        scale = 10 * over_all  # this architecture's key has a tenth of the field
        scaling = {**(file.rope_scaling() or {}), "mscale": scale, "mscale_all_dim": scale}
        fields["rope_scaling"] = scaling
    if file.has(f"blk.{num_dense}.exp_probs_b.bias"):
        return fields
    if file.get("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise ConfigError(f"{file.path}: sigmoids without a correction are not supported")
    # With one group, as in V2-Lite, this is "greedy".
    method = {"topk_method": "group_limited_greedy"}
    return {**fields, **method, "architectures": ["DeepseekV2ForCausalLM"]}


def _exaone4(file: GgufValues) -> Fields:
    window = file.get("attention.sliding_window", None)
    if not window:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": layer_types(file)}


def _seed_oss(file: GgufValues) -> Fields:
    return {**_plain(file), "attention_out_bias": file.has("blk.0.attn_output.bias")}


def _cohere(file: GgufValues) -> Fields:
    fields = {
        **_plain(file),
        "logit_scale": file.get("logit_scale"),
        "use_qk_norm": file.has("blk.0.attn_q_norm.weight"),
    }
    if file.arch == "cohere2":
        fields |= {
            "sliding_window": file.get("attention.sliding_window"),
            "layer_types": layer_types(file),
        }
    return fields


def _ernie4_5(file: GgufValues) -> Fields:
    return {"use_bias": file.has("blk.0.attn_q.bias")}


def _minimax_m2(file: GgufValues) -> Fields:
    return {
        **expert_counts(file, "num_local_experts"),
        "intermediate_size": file.get("expert_feed_forward_length"),
        "rotary_dim": file.get("rope.dimension_count"),
    }


def _encoder(file: GgufValues) -> Fields:
    """BERT, RoBERTa and NomicBERT. A file without a kind of pooling is an older one of BERT."""
    pooling = file.get("pooling_type", 1)
    fields: Fields = {
        "pooling_type": pooling,
        "type_vocab_size": int(file.tensors["token_types.weight"].shape[1]),
    }
    if file.arch == "nomic-bert":
        return {**fields, "hidden_act": "silu"}
    # The converter leaves out RoBERTa's first positions, so that the first row is position 0.
    fields["max_position_embeddings"] = int(file.tensors["position_embd.weight"].shape[1])
    if pooling == RANK:
        labels = {"id2label": {"0": "score"}}
        return {**fields, **labels, "architectures": ["BertForSequenceClassification"]}
    return fields


FAMILIES: Final[Mapping[str, tuple[str, Callable[[GgufValues], Fields]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral3": ("Ministral3ForCausalLM", _ministral3),
    "qwen2": ("Qwen2ForCausalLM", _plain),
    "qwen2moe": ("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": ("Qwen3ForCausalLM", _plain),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen_moe),
    "qwen3vl": ("Qwen3ForCausalLM", _plain),
    "qwen3next": ("Qwen3_5MoeForCausalLM", qwen35),
    "qwen35": ("Qwen3_5ForCausalLM", qwen35),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", qwen35),
    "gemma": ("GemmaForCausalLM", lambda file: {}),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "gemma-embedding": ("Gemma3TextModel", _gemma_embedding),
    "gemma4": ("Gemma4ForCausalLM", _gemma4),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "lfm2": ("Lfm2ForCausalLM", lfm2),
    "lfm2moe": ("Lfm2MoeForCausalLM", lfm2),
    "granite": ("GraniteForCausalLM", _granite),
    "granitemoe": ("GraniteMoeForCausalLM", _granite),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", _granite),
    "smollm3": ("SmolLM3ForCausalLM", _plain),
    "olmo2": ("Olmo2ForCausalLM", _olmo2),
    "olmoe": ("OlmoeForCausalLM", _olmoe),
    "chatglm": ("GlmForCausalLM", _plain),
    "glm4": ("Glm4ForCausalLM", _plain),
    "glm4moe": ("Glm4MoeForCausalLM", _glm4_moe),
    "dots1": ("Dots1ForCausalLM", _dots1),
    "afmoe": ("AfmoeForCausalLM", _afmoe),
    "deepseek2": ("DeepseekV3ForCausalLM", _deepseek2),
    "exaone4": ("Exaone4ForCausalLM", _exaone4),
    "seed_oss": ("SeedOssForCausalLM", _seed_oss),
    "command-r": ("CohereForCausalLM", _cohere),
    "cohere2": ("Cohere2ForCausalLM", _cohere),
    "ernie4_5": ("Ernie4_5ForCausalLM", _ernie4_5),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", _plain),
    "minimax-m2": ("MiniMaxM2ForCausalLM", _minimax_m2),
    "falcon-h1": ("FalconH1ForCausalLM", falcon_h1),
    "nemotron_h": ("NemotronHForCausalLM", nemotron_h),
    "nemotron_h_moe": ("NemotronHForCausalLM", nemotron_h),
    "bert": ("BertModel", _encoder),
    "nomic-bert": ("NomicBertModel", _encoder),
}
"""llama.cpp's name -> the architecture in config.json, and the function for the other fields, which
may replace the architecture."""
