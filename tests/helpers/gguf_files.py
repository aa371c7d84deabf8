"""GGUF files of small random models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from helpers import text_checkpoints
from helpers.model_harness import make_reference
from minisgl_zoo.gguf.changes import PLUS_ONE
from minisgl_zoo.gguf.names import EXPERT_KINDS, GLOBAL_NAMES, names_of

VOCAB = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,  # K-quants have blocks of 256
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rope_theta": 5e4,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
        decoder_sparse_step=1, norm_topk_prob=True,
    ),
    "command-r": CohereConfig(  # Command R+
        **{name: size for name, size in SIZES.items() if name != "head_dim"}
        | {"tie_word_embeddings": True},
        use_qk_norm=True, logit_scale=0.25,
    ),
    "gemma2": Gemma2Config(
        **{**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True, "sliding_window": 8},
        query_pre_attn_scalar=64, attention_dropout=0.0,
    ),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7, "tie_word_embeddings": True, "sliding_window": 8},
        query_pre_attn_scalar=64,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt-oss": GptOssConfig(
        **{**SIZES, "sliding_window": 8}, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "truncate": False,
            "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32,
        },
    ),
}  # fmt: skip
DELTA: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.25},
}
CONFIGS["qwen35"] = Qwen3_5TextConfig(**DELTA)
CONFIGS["qwen35moe"] = Qwen3_5MoeTextConfig(
    **DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
    shared_expert_intermediate_size=128,
)  # fmt: skip
QUANTISED = {
    "F16": Kind.F16,
    "BF16": Kind.BF16,
    "Q8_0": Kind.Q8_0,
    "Q4_0": Kind.Q4_0,
    "Q5_1": Kind.Q5_1,
    "Q4_K": Kind.Q4_K,
    "Q5_K": Kind.Q5_K,
    "Q6_K": Kind.Q6_K,
    "IQ4_NL": Kind.IQ4_NL,
    "IQ4_XS": Kind.IQ4_XS,
}
PLACES = {
    Kind.Q4_K: ((0, 0.002), (2, 0.01)),
    Kind.Q5_K: ((0, 0.001), (2, 0.01)),
    Kind.Q6_K: ((208, 0.0001),),
    Kind.IQ4_NL: ((0, 0.001),),
    Kind.IQ4_XS: ((0, 0.00004),),
}
"""The places of the float16 factors in a block, and a value that keeps weights small."""


def packed(values: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """Return the blocks of the values; random blocks if the package cannot quantise to `kind`."""
    if kind not in PLACES:
        return gguf.quants.quantize(values, kind)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    per_block = gguf.GGML_QUANT_SIZES[kind][0]
    rng = np.random.default_rng(values.shape[0])
    shape = (*values.shape[:-1], values.shape[-1] // per_block, size)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    for place, factor in PLACES[kind]:
        factors = (rng.random((*shape[:-1], 1)) * factor).astype(np.float16)
        blocks[..., place : place + 2] = factors.view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Permute rows as llama.cpp's converter does for q and k of Llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def taking_turns(name: str, values: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """Order the value heads of delta nets as llama.cpp's converter does."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim

    def turns(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        size = len(rows) // heads
        parts = rows.reshape(keys, heads // keys, size, *rows.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1).reshape(rows.shape))

    if "in_proj_qkv" in name or "conv1d" in name:
        values = values.reshape(values.shape[0], values.shape[-1])
        return np.concatenate((values[:first], turns(values[first:])))
    if "out_proj" in name:
        return np.ascontiguousarray(turns(np.ascontiguousarray(values.T)).T)
    if name.endswith("A_log"):
        values = -np.exp(values)
    return values if name.endswith("norm.weight") else turns(values)


Change = Callable[[gguf.GGUFWriter], None]


def write(
    path: Path,
    arch: str,
    kind: Kind = Kind.F32,
    change: Change | None = None,
    tensors_of_a_part: int = 0,
) -> None:
    """Write the file of a random model, or its parts, with the tokenizer of `text_checkpoints`."""
    config: Any = CONFIGS[arch]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_of_a_part)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 64)
    if arch == "command-r":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5e4)
    if arch.startswith("qwen35"):
        writer.add_rope_dimension_count(16)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_full_attention_interval(4)
    if arch == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch in ("qwen3moe", "qwen35moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if "sliding_window" in config.to_dict() and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    if arch == "gpt-oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
    add_tokenizer(writer, path.parent / "tokenizer")
    if change:
        change(writer)
    tensors = make_reference(config).state_dict()
    names = {new: old for old, new in GLOBAL_NAMES.items() if old != "token_embd_norm"}
    for layer in range(config.num_hidden_layers):
        names |= {
            f"model.layers.{layer}.{new}": f"blk.{layer}.{old}"
            for old, new in names_of(arch).items()
        }
        router = "router" if arch == "gpt-oss" else "gate"
        names[f"model.layers.{layer}.mlp.{router}"] = f"blk.{layer}.ffn_gate_inp"
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        values = tensor.float().numpy()
        if ".mlp.experts." in name:
            continue
        if config.tie_word_embeddings and module == "lm_head":
            continue
        if arch in PLUS_ONE and "norm" in module and ".linear_attn." not in module:
            values = values + 1
        if ".linear_attn." in name:
            values = taking_turns(name, values, config)
        if module.endswith("shared_expert_gate"):
            values = values.reshape(-1)
        if own := names.get(name):  # without a last part of its own
            add(writer, own, values, kind)
            continue
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            values = interleave(values, heads)
        add(writer, f"{names[module]}.{suffix}", values, kind)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        for suffix, end in (("weight", ""), ("bias", "_bias")):
            if f"{prefix}.gate_up_proj{end}" not in tensors:
                continue
            gate_up = tensors[f"{prefix}.gate_up_proj{end}"].float().numpy()
            down = tensors[f"{prefix}.down_proj{end}"].float().numpy()
            if arch == "gpt-oss":
                gate_up, down = (x if end else x.swapaxes(1, 2) for x in (gate_up, down))
                gate, up = gate_up[:, ::2], gate_up[:, 1::2]
            else:
                gate, up = np.split(gate_up, 2, 1)
            for name, values in zip(EXPERT_KINDS, (gate, up, down), strict=True):
                values = np.ascontiguousarray(values)
                add(writer, f"blk.{layer}.{name}.{suffix}", values, Kind.F32 if end else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: Kind) -> None:
    is_plain = kind == Kind.MXFP4 and "_exps.weight" not in name  # as llama.cpp's converter does
    is_plain |= values.ndim == 1 or "ffn_gate_inp" in name or "conv1d" in name
    if kind == Kind.F32 or is_plain:
        writer.add_tensor(name, values)
    elif kind == Kind.F16:
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, packed(values, kind), raw_dtype=kind)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    text_checkpoints.make(folder, "byte_level")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    count = tokenizer.get_vocab_size()
    assert count <= VOCAB
    tokens = [str(tokenizer.id_to_token(i)) for i in range(count)]
    added = tokenizer.get_added_tokens_decoder()
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(count)]
    fill = VOCAB - count
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(fill)])
    writer.add_token_types(kinds + [5] * fill)
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in model["merges"]])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
