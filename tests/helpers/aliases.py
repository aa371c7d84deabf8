"""Families that transformers has not, or under another family's class: their checkpoints, made of
that class's.

The config is spelled as it was released, and so are the names of the tensors. BailingMoeV2's are
from its makers' repository (inclusionAI/Ling-V2, models/modeling_bailing_moe_v2.py), as is what it
computes: GLM-4.5's attention and mixture. MiMo is Qwen2 with layers that predict several tokens
(XiaomiMiMo/MiMo). InternLM3 is Llama in transformers, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    InternLM3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from helpers.family_cases import GLM4_MOE, SIZES
from helpers.model_harness import make_reference

Tensors = dict[str, Tensor]
SHARED = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers")


def mimo(tensors: Tensors) -> Tensors:
    layer = {name: value for name, value in tensors.items() if name.startswith("model.layers.0.")}
    drafts = {
        name.replace("layers.0.", "mtp_layers.0."): value.clone() for name, value in layer.items()
    }
    return {**tensors, **drafts, "model.mtp_layers.0.input_proj.weight": torch.ones(48, 96)}


def bailing(tensors: Tensors) -> Tensors:
    names = {
        "embed_tokens": "word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "gate.e_score_correction_bias": "gate.expert_bias",
    }
    made = dict[str, Tensor]()
    for name, value in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            made[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            made[name] = value
    made["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)  # of the layer that drafts
    return made


GLM = {
    **SIZES,
    **GLM4_MOE,
    "n_group": 3,
    "topk_group": 2,
    "use_qk_norm": True,
    "n_shared_experts": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 600_000.0,
        "partial_rotary_factor": 0.5,
    },
}
QWEN: dict[str, Any] = {**SIZES, "head_dim": 12, "num_hidden_layers": 2}

# architecture -> (the class of transformers that computes the same, config.json as released
# without sizes, the names of sizes in it -> there, tensors -> as released)
ALIASES: dict[
    str, tuple[PreTrainedConfig, dict[str, Any], dict[str, str], Callable[[Tensors], Tensors]]
] = {
    "InternLM3ForCausalLM": (
        InternLM3Config(**SIZES, head_dim=16, attention_bias=True, mlp_bias=True),
        {
            "model_type": "internlm3",
            "bias": True,
            "qkv_bias": True,
            "hidden_act": "silu",
            "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
            "rope_theta": 10_000,
            "tie_word_embeddings": False,
        },
        {},
        dict,
    ),
    "MiMoForCausalLM": (
        Qwen2Config(**QWEN, rope_parameters={"rope_type": "default", "rope_theta": 640_000.0}),
        {
            "model_type": "mimo",
            "attention_bias": True,
            "hidden_act": "silu",
            "rope_theta": 640_000,
            "sliding_window": 32_768,
            "max_window_layers": 32,
            "use_sliding_window": False,
            "use_mrope": False,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
        },
        {},
        mimo,
    ),
    "BailingMoeV2ForCausalLM": (
        Glm4MoeConfig(**GLM),
        {
            "model_type": "bailing_moe",
            "hidden_act": "silu",
            "use_bias": False,
            "use_qkv_bias": False,
            "use_qk_norm": True,
            "norm_topk_prob": True,
            "moe_router_enable_expert_bias": True,
            "score_function": "sigmoid",
            "router_dtype": "fp32",
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rope_scaling": None,
            "rope_theta": 600_000,
            "tie_word_embeddings": False,
            "first_k_dense_replace": 1,
        },
        {
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            **{name: name for name in ("num_experts_per_tok", "moe_intermediate_size", "n_group")},
            **{name: name for name in ("topk_group", "routed_scaling_factor")},
        },
        bailing,
    ),
}


def save_alias(architecture: str, folder: Path) -> PreTrainedModel:
    """Save a checkpoint as released. Returns the model of transformers that computes the same."""
    config, values, sizes, renamed = ALIASES[architecture]
    reference = make_reference(config)
    reference.save_pretrained(folder, save_original_format=True)
    sizes = {**{name: name for name in (*SHARED, *HEADS)}, **sizes}
    values = {name: getattr(config, theirs) for name, theirs in sizes.items()} | values
    values |= {"architectures": [architecture], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values))
    file = folder / "model.safetensors"
    save_file(renamed(load_file(file)), file, metadata={"format": "pt"})
    return reference
