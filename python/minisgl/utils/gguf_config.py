"""config.json, as Hugging Face has it, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl.errors import ConfigError

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
ENDS: Final[Mapping[str, tuple[str, ...]]] = {
    "gemma2": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "gpt-oss": ("<|return|>", "<|call|>", "<|endoftext|>"),
}
"""Tokens that end an answer beside those that the metadata names."""
ROPE_FREQS: Final = "rope_freqs.weight"
"""Factors of each frequency: Llama 3.1's stretched rotations, which no key describes."""
LLAMA3: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of all models of Meta that have such factors."""
GEMMA2_27B, GEMMA3_27B = 46, 62
"""Layers of the sizes that scale queries by the hidden size over the heads, which no key says."""


@dataclass(frozen=True, slots=True)
class _File:
    values: Mapping[str, Any]
    tensors: Mapping[str, Any]
    path: Path

    @property
    def arch(self) -> str:
        return str(self.values["general.architecture"])

    @property
    def num_layers(self) -> int:
        """Without those that predict several tokens, which come last and are not read."""
        return int(self.get("block_count") - self.get("nextn_predict_layers", 0))

    def get(self, key: str, *default: Any) -> Any:
        """Of the architecture. Raises KeyError where it is absent and there is no default."""
        name = f"{self.arch}.{key}"
        return self.values.get(name, *default) if default else self.values[name]


def config_of(reader: Any, values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """reader: a gguf.GGUFReader. values: its metadata. Raises ConfigError where the model is not
    supported, and what a dict raises where a key is missing."""
    file = _File(values, {tensor.name: tensor for tensor in reader.tensors}, path)
    arch = file.arch
    if arch not in ARCHITECTURES or (file.get("expert_count", 0) and arch == "llama"):
        raise ConfigError(
            f"{path}: GGUF files of the architecture {arch!r} are not read; supported are "
            f"{', '.join(ARCHITECTURES)} (llama without experts). Others: the checkpoint that the "
            "file was made from, whose weights are *.safetensors"
        )
    if values.get("split.count", 1) > 1:
        raise ConfigError(
            f"{path} is one of {values['split.count']} parts: merge them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    heads, hidden = file.get("attention.head_count"), file.get("embedding_length")
    stops = {values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
    tokens = values["tokenizer.ggml.tokens"]
    stops |= {tokens.index(token) for token in ENDS.get(arch, ()) if token in tokens}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": file.get(
            "feed_forward_length", file.get("expert_feed_forward_length", 0)
        ),
        "num_hidden_layers": file.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": file.get("attention.key_length", hidden // heads),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.get("rope.freq_base", 10000.0),
        "max_position_embeddings": file.get("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
        "eos_token_id": sorted(stops),
    }
    if scaling := _rope_scaling(file):
        config["rope_scaling"] = scaling
    return config | OWN.get(arch, _plain)(file)


def _plain(file: _File) -> dict[str, Any]:
    bias = file.arch == "llama" and "blk.0.attn_q.bias" in file.tensors
    return {"hidden_act": "silu", "attention_bias": bias}


def _qwen3_moe(file: _File) -> dict[str, Any]:
    return {**_plain(file), **_experts(file)}


def _experts(file: _File) -> dict[str, Any]:
    return {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma2(file: _File) -> dict[str, Any]:
    return {
        "sliding_window": file.get("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scale(file, GEMMA2_27B),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
    }


def _gemma3(file: _File) -> dict[str, Any]:
    return {
        "sliding_window": file.get("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scale(file, GEMMA3_27B),
    }


def _query_scale(file: _File, largest: int) -> int:
    """What queries are divided by the root of."""
    if file.get("block_count") == largest:
        return int(file.get("embedding_length") // file.get("attention.head_count"))
    return int(file.get("attention.key_length"))


def _gpt_oss(file: _File) -> dict[str, Any]:
    return {
        "intermediate_size": file.get("expert_feed_forward_length"),
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "sliding_window": file.get("attention.sliding_window"),
    }


def _qwen35(file: _File) -> dict[str, Any]:
    values = file.get("ssm.time_step_rank")
    interval = file.get("full_attention_interval", 4)
    types = ["linear_attention"] * (interval - 1) + ["full_attention"]
    config = {
        "hidden_act": "silu",
        "partial_rotary_factor": file.get("rope.dimension_count")
        / file.get("attention.key_length"),
        "layer_types": [types[i % interval] for i in range(file.num_layers)],
        "linear_num_key_heads": file.get("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": file.get("ssm.state_size"),
        "linear_value_head_dim": file.get("ssm.inner_size") // values,
        "linear_conv_kernel_dim": file.get("ssm.conv_kernel"),
    }
    if file.arch == "qwen35moe":
        config |= _experts(file)
        config["shared_expert_intermediate_size"] = file.get("expert_shared_feed_forward_length")
    return config


OWN: Final[Mapping[str, Callable[[_File], dict[str, Any]]]] = {
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
}
"""Fields of an architecture's own."""


def is_mxfp4(tensor: Any) -> bool:
    return bool(tensor.tensor_type.name == "MXFP4")


def _rope_scaling(file: _File) -> dict[str, Any] | None:
    if ROPE_FREQS in file.tensors:
        return {**LLAMA3, "factor": float(file.tensors[ROPE_FREQS].data.max())}
    kind = file.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{file.path}: rope.scaling.type is {kind!r}, expected none, linear or yarn"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": file.get("rope.scaling.factor")}
    if kind == "yarn":
        original = file.get("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
        if file.arch == "gpt-oss":
            scaling["truncate"] = False
    return scaling
