"""Released config.json files (`tests/zoo/models/released`), as they are and with small sizes.

`shrunk` changes sizes, ids of tokens and the dtype, and leaves each other field as it was released.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "zoo" / "models" / "released"
RELEASED = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 211,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 3,
    "experts_per_token": 3,
    "top_k_experts": 3,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16),
    **dict.fromkeys(("head_dim", "attention_head_dim"), 24),
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "rotary_dim": 12,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "v_head_dim": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 8,
    "sliding_window": 9,
    "block_dim": 64,
    "block_ff_dim": 96,
    "conv_dim": 64,
    "conv_dim_out": 64,
    "num_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A field -> its size here, where the file has a number (for an id of a token also where it has a
list)."""
LISTS = ("layer_types", "hybrid_override_pattern", "is_moe_layer", "attn_type_list")
"""Fields with an entry for each layer."""


def read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return values


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a small model. A quantised one becomes plain."""
    small = {name: value for name, value in values.items() if name != "quantization_config"}
    if "text_config" in values:
        return _float32({**small, "text_config": shrunk(values["text_config"])})
    for name, size in SIZES.items():
        if type(small.get(name)) is int or (name.endswith("_id") and small.get(name) is not None):
            small[name] = size
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    small["num_attention_heads"] = 4
    small["num_key_value_heads"] = 4 if kv_heads == heads else min(kv_heads, 2)
    small["num_hidden_layers"] = count = _num_layers(values)
    small |= {name: values[name][:count] for name in LISTS if name in values}
    head_dim = small.get("head_dim", 16)
    for name in ("rope_scaling", "rope_parameters"):
        if rope := small.get(name):
            partial = small.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1))
            small[name] = _rope(rope, int(head_dim * partial) // 2)
    return _float32(small)


def _num_layers(values: dict[str, Any]) -> int:
    """Return a number of layers that has a layer of each kind."""
    count = 2 + values.get("first_k_dense_replace", 0)
    count = max(count, values.get("sliding_window_pattern", 0)) if _is_number(values) else count
    count = max(count, values.get("full_attention_interval", 0))
    for name in LISTS:
        kinds = values.get(name, ())
        count = max([count, *(kinds.index(kind) + 1 for kind in kinds)])
    return count + 1


def _is_number(values: dict[str, Any]) -> bool:
    return type(values.get("sliding_window_pattern", 0)) is int


def _rope(rope: dict[str, Any], pairs: int) -> dict[str, Any]:
    small = dict(rope)
    if "mrope_section" in rope:
        small["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return small | {
        name: rope[name][:pairs]
        for name in rope
        if name.endswith("_factor") and type(rope[name]) is list
    }


def _float32(values: dict[str, Any]) -> dict[str, Any]:
    return values | {name: "float32" for name in ("dtype", "torch_dtype") if name in values}
