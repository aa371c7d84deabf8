"""Configurations of every family, and their comparison with transformers."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    Cohere2MoeConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSWAConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    LlamaConfig,
    MellumConfig,
    MiniMaxM2Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SolarOpenConfig,
    YoutuConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from helpers.dense_cases import DENSE_CASES, GRANITE_SWA
from helpers.hybrid_cases import HYBRID_CASES
from helpers.model_harness import (
    VOCAB,
    Runner,
    Sequence,
    make_reference,
    random_ids,
    relative_error,
    to_old_spelling,
)

# transformers maps it only among models of text and images.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **values}


LLAMA3 = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
MOE = {"num_experts": 9, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
GLM4_MOE: dict[str, Any] = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.7,
}
SOLAR = {name: value for name, value in GLM4_MOE.items() if name != "num_hidden_layers"}
EXAONE_MOE: dict[str, Any] = {**MOE, "head_dim": 16, "sliding_window": 9}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
LATENTS = {
    name: DEEPSEEK[name] for name in DEEPSEEK if "rank" in name or "dim" in name or "heads" in name
}
AFMOE: dict[str, Any] = {
    **MOE,
    "head_dim": 16,
    "num_shared_experts": 1,
    "route_scale": 1.7,
    "sliding_window": 9,
    "mup_enabled": True,
}
COHERE2_MOE: dict[str, Any] = {
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "sliding_window": 9,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 40,
    "logit_scale": 0.25,
}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "rope_parameters": {**YARN, "truncate": False},
}
HY_V3: dict[str, Any] = {**MOE, "head_dim": 16, "router_scaling_factor": 1.7}
ERNIE_MOE: dict[str, Any] = {"moe_num_experts": 9, "moe_k": 3, "moe_intermediate_size": 24}
MISTRAL4_ROPE = {**YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.4}
MSCALE = {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}


# name -> (config class, changes, page size, old spelling of config.json)
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], int, bool]] = {
    "llama": (LlamaConfig, {}, 1, False),
    "llama-old": (LlamaConfig, {"rope_parameters": rope("default", rope_theta=500.0)}, 4, True),
    "llama-mha-tied": (
        LlamaConfig,
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        4,
        False,
    ),
    "llama-gqa7": (
        LlamaConfig,
        {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 10, "hidden_size": 35},
        1,
        False,
    ),
    "llama-head-dim": (LlamaConfig, {"head_dim": 22, "rms_norm_eps": 1e-3}, 4, False),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}, 4, False),
    "llama-gelu": (LlamaConfig, {"hidden_act": "gelu_pytorch_tanh"}, 1, False),
    "llama-linear": (LlamaConfig, {"rope_parameters": rope("linear", factor=3.0)}, 1, False),
    "llama-linear-old": (LlamaConfig, {"rope_parameters": rope("linear", factor=3.0)}, 4, True),
    "llama-dynamic": (LlamaConfig, {"rope_parameters": rope("dynamic", factor=2.0)}, 1, False),
    "llama-dynamic-old": (LlamaConfig, {"rope_parameters": rope("dynamic", factor=2.0)}, 4, True),
    "llama-llama3": (LlamaConfig, {"rope_parameters": LLAMA3}, 1, False),
    "llama-llama3-old": (LlamaConfig, {"rope_parameters": LLAMA3}, 4, True),
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN}, 4, False),
    "llama-yarn-mscale": (LlamaConfig, {"rope_parameters": {**YARN, **MSCALE}}, 4, False),
    "mistral": (MistralConfig, {"sliding_window": 16}, 4, False),
    "mistral-old": (MistralConfig, {"sliding_window": 13, "head_dim": 16}, 1, True),
    "mistral-full": (MistralConfig, {"sliding_window": None, "num_key_value_heads": 1}, 1, False),
    "qwen2": (Qwen2Config, {"num_attention_heads": 6, "num_key_value_heads": 6}, 1, False),
    "qwen2-tied-old": (Qwen2Config, {"tie_word_embeddings": True}, 4, True),
    "qwen2.5-window": (
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
        4,
        True,
    ),
    "qwen2.5-layer-types": (
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        1,
        False,
    ),
    "qwen2.5-yarn": (Qwen2Config, {"rope_parameters": YARN}, 4, True),
    "qwen3": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}, 4, False),
    "qwen3-gqa7-bias": (
        Qwen3Config,
        {
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "attention_bias": True,
        },
        1,
        False,
    ),
    "qwen3-window-old": (
        Qwen3Config,
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "rope_parameters": rope("default", rope_theta=1e6),
        },
        4,
        True,
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {**MOE, "head_dim": 20, "mlp_only_layers": [0], "norm_topk_prob": True},
        4,
        False,
    ),
    "qwen3-moe-stacked": (
        Qwen3MoeConfig,
        {**MOE, "head_dim": 16, "decoder_sparse_step": 2, "num_experts_per_tok": 9},
        1,
        False,
    ),
    "qwen3-moe-window-old": (
        Qwen3MoeConfig,
        {**MOE, "head_dim": 16, "use_sliding_window": True, "sliding_window": 9},
        4,
        True,
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 5}, 4, False),
    "mixtral-stacked": (
        MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 11},
        1,
        False,
    ),
    "qwen2-moe": (Qwen2MoeConfig, {**MOE, "shared_expert_intermediate_size": 56}, 4, True),
    "qwen2-moe-stacked": (
        Qwen2MoeConfig,
        {
            **MOE,
            "shared_expert_intermediate_size": 33,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
        1,
        False,
    ),
    "glm4-moe": (
        Glm4MoeConfig,
        {**GLM4_MOE, "n_group": 3, "topk_group": 2, "use_qk_norm": True, "n_shared_experts": 2},
        4,
        False,
    ),
    "glm4-moe-stacked": (
        Glm4MoeConfig,
        {**GLM4_MOE, "attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 2},
        1,
        False,
    ),
    "minimax-m2-moe": (
        MiniMaxM2Config,
        {"num_local_experts": 9, "num_experts_per_tok": 3, "head_dim": 16},
        4,
        False,
    ),
    "minimax-m2-moe-half-stacked": (
        MiniMaxM2Config,
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "rope_parameters": rope("default", partial_rotary_factor=0.5),
        },
        1,
        False,
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 5, "num_experts_per_tok": 2}, 4, False),
    "olmoe-stacked": (
        OlmoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True},
        1,
        False,
    ),
    "granite-moe": (
        GraniteMoeConfig,
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
        4,
        True,
    ),
    "granite-moe-stacked": (
        GraniteMoeConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_bias": True},
        1,
        False,
    ),
    "granite-moe-swa": (
        GraniteMoeSWAConfig,
        {**GRANITE_SWA, "num_local_experts": 5, "num_experts_per_tok": 3},
        4,
        False,
    ),
    "granite-moe-swa-shared-expert": (
        GraniteMoeSWAConfig,
        {
            **GRANITE_SWA,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 40,
            "layer_rope_theta": [500.0, 0, 0, 10_000.0, 500.0],
        },
        1,
        False,
    ),
    "mellum-moe": (
        MellumConfig,
        {
            **MOE,
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_hidden_layers": 3,
            "sliding_window": 9,
        },
        4,
        False,
    ),
    "mellum-moe-stacked": (
        MellumConfig,
        {**MOE, "head_dim": 16, "norm_topk_prob": False},
        1,
        False,
    ),
    "solar-open-moe": (SolarOpenConfig, SOLAR, 4, False),
    "solar-open-moe-groups-old": (
        SolarOpenConfig,
        {
            **SOLAR,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
        1,
        True,
    ),
    "exaone-moe": (ExaoneMoeConfig, {**EXAONE_MOE, "num_hidden_layers": 5}, 4, False),
    "exaone-moe-types-stacked": (
        ExaoneMoeConfig,
        {
            **EXAONE_MOE,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "num_shared_experts": 2,
        },
        16,
        False,
    ),
    "deepseek-v3-moe": (DeepseekV3Config, DEEPSEEK, 4, False),
    "deepseek-v3-moe-groups-old": (
        DeepseekV3Config,
        {
            **DEEPSEEK,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
        },
        1,
        True,
    ),
    "deepseek-v2-moe": (
        DeepseekV2Config,
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 1,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        4,
        False,
    ),
    "deepseek-v2-moe-groups-old": (
        DeepseekV2Config,
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale_all_dim": 0.7},
        },
        1,
        True,
    ),
    "youtu": (YoutuConfig, LATENTS, 4, False),
    "youtu-untied-old": (
        YoutuConfig,
        {
            **LATENTS,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
            "tie_word_embeddings": False,
        },
        1,
        True,
    ),
    "afmoe": (AfmoeConfig, {**AFMOE, "num_hidden_layers": 5}, 4, False),
    "afmoe-types-stacked-old": (
        AfmoeConfig,
        {
            **AFMOE,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_dense_layers": 0,
            "num_shared_experts": 2,
            "mup_enabled": False,
            "tie_word_embeddings": True,
        },
        1,
        True,
    ),
    "cohere2-moe": (
        Cohere2MoeConfig,
        {**COHERE2_MOE, "num_shared_experts": 1, "num_hidden_layers": 6},
        4,
        False,
    ),
    "cohere2-moe-rms-norm-stacked": (
        Cohere2MoeConfig,
        {
            **COHERE2_MOE,
            "first_k_dense_replace": 2,
            "prefix_dense_sliding_window_pattern": 2,
            "num_hidden_layers": 3,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-3,
        },
        1,
        False,
    ),
    "cohere2-moe-types-old": (
        Cohere2MoeConfig,
        {
            **COHERE2_MOE,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "layer_norm_eps": 1e-3,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        1,
        True,
    ),
    "dots1-moe": (
        Dots1Config,
        {**GLM4_MOE, "n_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1},
        4,
        False,
    ),
    "dots1-moe-window-stacked": (
        Dots1Config,
        {
            **GLM4_MOE,
            "n_shared_experts": 1,
            "n_group": 3,
            "topk_group": 2,
            "max_window_layers": 1,
            "sliding_window": 9,
            "attention_bias": True,
        },
        1,
        False,
    ),
    "mistral4-moe": (Mistral4Config, {**DEEPSEEK, "rope_parameters": MISTRAL4_ROPE}, 4, False),
    "mistral4-moe-groups-stacked": (
        Mistral4Config,
        {
            **DEEPSEEK,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "rope_interleave": False,
            "rope_parameters": {**MISTRAL4_ROPE, "original_max_position_embeddings": 9},
        },
        1,
        False,
    ),
    "hunyuan-moe": (
        HunYuanMoEV1Config,
        {"num_experts": 5, "moe_topk": [3, 3], "head_dim": 16},
        4,
        False,
    ),
    "hunyuan-moe-stacked": (
        HunYuanMoEV1Config,
        {
            "num_experts": 4,
            "moe_topk": 2,
            "head_dim": 10,
            "rope_parameters": rope("dynamic", alpha=1000.0, factor=1.0),
        },
        1,
        False,
    ),
    "hy-v3-moe": (HYV3Config, {**HY_V3, "num_hidden_layers": 3}, 4, False),
    "hy-v3-moe-types-stacked": (
        HYV3Config,
        {
            **HY_V3,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense"],
            "num_shared_experts": 2,
        },
        1,
        False,
    ),
    "ernie4.5-moe": (Ernie4_5_MoeConfig, {**ERNIE_MOE, "pad_token_id": 0}, 4, False),
    "ernie4.5-moe-stacked": (
        Ernie4_5_MoeConfig,
        {
            **ERNIE_MOE,
            "pad_token_id": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "num_hidden_layers": 5,
            "tie_word_embeddings": False,
        },
        1,
        False,
    ),
    "glm4-lite-moe": (Glm4MoeLiteConfig, {**DEEPSEEK, "v_head_dim": 24}, 16, False),
    "gpt-oss": (GptOssConfig, GPT_OSS, 4, False),
    "gpt-oss-old": (
        GptOssConfig,
        {
            **GPT_OSS,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_key_value_heads": 4,
            "swiglu_limit": 0.7,
            "swiglu_alpha": 1.3,
        },
        1,
        True,
    ),
    **DENSE_CASES,
    **HYBRID_CASES,
}


def save_case(name: str, folder: Path) -> tuple[PreTrainedModel, int]:
    """Save the reference to the folder. Returns it and the page size."""
    config_class, changes, page_size, old_spelling = CASES[name]
    reference = make_reference(config_class(**{**SIZES, **changes}))
    for module in reference.modules():  # transformers 5.17 has constants for these fields
        if isinstance(module, GptOssExperts):
            module.alpha = changes.get("swiglu_alpha", module.alpha)
            module.limit = changes.get("swiglu_limit", module.limit)
    # The other layout of experts is transformers' own: one tensor for all.
    reference.save_pretrained(folder, save_original_format=not name.endswith("stacked"))
    if old_spelling:
        to_old_spelling(folder)
    return reference, page_size


def check_case(reference: PreTrainedModel, runner: Runner, num_outputs: int) -> None:
    """Compare two sequences' logits and greedy tokens with the reference's.

    One pass of the reference over a sequence has its choice after each token.
    """
    sequences = [Sequence(random_ids(37, 1), num_outputs), Sequence(random_ids(20, 2), num_outputs)]
    runner.generate(sequences, chunk=7)
    for sequence in sequences:
        expected = reference(torch.tensor([sequence.ids[:-1]])).logits[0]
        logits = torch.cat(sequence.logits).float().cpu()
        if relative_error(logits, expected) > TOLERANCE:
            check_sensitive(reference, sequence, logits, expected)
        check_greedy(sequence, logits, expected)


def check_sensitive(
    reference: PreTrainedModel, sequence: Sequence, logits: torch.Tensor, expected: torch.Tensor
) -> None:
    """Check that no position differs by more than the reference's own change there, when each of
    its weights is moved by at most half a unit in the last place. A random model can have very
    sensitive positions: 1e-7 moved one of Qwen3.5's mixture by 4e-4, the median position by
    3e-6."""
    rng = torch.Generator().manual_seed(0)
    moved = torch.zeros(len(expected))
    for _ in range(8):
        near = copy.deepcopy(reference)
        for weight in near.parameters():
            weight.mul_(1 + (2 * torch.rand(weight.shape, generator=rng) - 1) * 2**-24)
        other = near(torch.tensor([sequence.ids[:-1]])).logits[0]
        moved = torch.maximum(moved, (other - expected).abs().amax(-1))
    bound = torch.clamp(moved, min=TOLERANCE * float(expected.abs().max()))
    assert ((logits - expected).abs().amax(-1) <= bound).all()


def check_greedy(sequence: Sequence, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that each token is the reference's choice after the tokens before it, or that the
    reference nearly ties.

    Such a near tie is counted among pytest's warnings.
    """
    assert len(sequence.outputs) == sequence.num_outputs
    for i, ours in enumerate(sequence.outputs):
        row = len(sequence.prompt) - 1 + i
        theirs = int(expected[row].argmax())
        if ours != theirs:
            first, second = expected[row].topk(2).values
            error = (logits[row] - expected[row]).abs().max()
            assert first - second <= error, f"token {i}: {ours} instead of {theirs}"
            warnings.warn(f"near tie at token {i}: top-2 gap {first - second}", stacklevel=1)


# Every expert of a mixture, as two that the router nearly ties may change places in 16 bits.
ALL_EXPERTS = {**MOE, "num_experts_per_tok": MOE["num_experts"]}
ALL_GPT_OSS = {**GPT_OSS, "num_experts_per_tok": GPT_OSS["num_local_experts"]}
ALL_LATENT = {
    **DEEPSEEK,
    "num_experts_per_tok": DEEPSEEK["n_routed_experts"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
"""Latents of the published models' size, which FlashAttention requires."""
