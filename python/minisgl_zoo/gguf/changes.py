"""Undoes the changes that llama.cpp's converter makes to tensors: see `change_of`.

Axes: K key heads, V value heads of a gated delta net.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from minisgl.models.config import ModelConfig
from minisgl_zoo.blocks.views import deinterleave
from minisgl_zoo.gguf.tensors import Change

ALL: Final = slice(None)
DELTA: Final = ("qwen3next", "qwen35", "qwen35moe")
PLUS_ONE: Final = ("gemma", "gemma2", "gemma3", "gemma-embedding", *DELTA)
"""Architectures whose files have 1 + the weight of each norm, except the gated one."""
INTERLEAVED: Final = (
    *("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3"),
    *("chatglm", "glm4", "command-r", "cohere2", "ernie4_5"),
)
"""Architectures whose rows of q and k are in the order of interleaved pairs."""
FUSED: Final = ("phi3", "chatglm", "glm4")
"""Architectures whose files have gate and up as one tensor."""


def parts_of(arch: str, kind: str, rows: int, config: ModelConfig) -> list[tuple[str, slice]]:
    """Return the kinds of matrices that a tensor of the file has, and the rows of each. One tensor
    may have q, k and v; gate and up; or b and a of a gated delta net."""
    if kind == "attn_qkv" and arch not in DELTA:
        q = config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        ends = slice(q), slice(q, q + kv), slice(q + kv, q + 2 * kv)
        return list(zip(("attn_q", "attn_k", "attn_v"), ends, strict=True))
    if kind == "ffn_up" and arch in FUSED:
        return [("ffn_gate", slice(rows // 2)), ("ffn_up", slice(rows // 2, rows))]
    if kind == "ssm_ba":
        return [("ssm_beta", ALL), ("ssm_alpha", ALL)]
    return [(kind, ALL)]


def change_of(arch: str, kind: str, config: ModelConfig) -> Change | None:
    """Return the function that turns a tensor of the file into the checkpoint's; None if they are
    the same. kind: such as attn_q.

    - Rows of q and k may be in the order of interleaved pairs, and with them the weights of norms
      that each head has of its own. Norms may have 1 + the weight.
    - The file has -exp(A_log) in place of A_log.
    - Qwen3.5: the file has the first value head of each key head, then the second of each. The
      checkpoint has the value heads of a key head side by side.
    - Qwen3-Next: b and a alternate, key head by key head.
    """
    if arch in INTERLEAVED and kind in ("attn_q", "attn_k"):
        return partial(deinterleave, head_dim=config.head_dim, rotary_dim=config.rope.rotary_dim)
    if arch == "command-r" and kind in ("attn_q_norm", "attn_k_norm"):
        rows = partial(deinterleave, head_dim=config.head_dim, rotary_dim=config.rope.rotary_dim)
        return lambda weight: rows(weight.flatten()).view(weight.shape)
    if arch in PLUS_ONE and kind.endswith("norm") and kind != "ssm_norm":
        return _minus_one
    if kind == "ffn_gate_inp_shexp":
        return lambda row: row.reshape(1, -1)
    if arch in DELTA:
        return _delta_change(arch, kind, config)
    return MAMBA_CHANGES.get(kind)


def reorders_columns(arch: str, kind: str) -> bool:
    """Whether `change_of` reorders columns. A row's blocks do not survive that."""
    return kind == "ssm_out" and arch in ("qwen35", "qwen35moe")


MAMBA_CHANGES: Final[dict[str, Change]] = {
    "ssm_a": lambda numbers: (-numbers).log().flatten(),
    "ssm_d": torch.flatten,
    "ssm_norm": torch.flatten,
    "ssm_conv1d": lambda taps: taps[:, None] if taps.dim() == 2 else taps,
    "shortconv.conv": lambda taps: taps[:, None] if taps.dim() == 2 else taps,
}
"""The changes for Mamba2 and short convolutions. A convolution's tensor is [channels, taps], or its
bias."""


def _minus_one(weight: Tensor) -> Tensor:
    return weight - 1


def _delta_change(arch: str, kind: str, config: ModelConfig) -> Change | None:
    keys, values, size, value_size = (
        config.fields.integer(f"linear_{name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    if arch == "qwen3next":
        return {
            **MAMBA_CHANGES,
            "ssm_beta": lambda rows: _half_of_pairs(rows, 0, keys=keys),
            "ssm_alpha": lambda rows: _half_of_pairs(rows, 1, keys=keys),
        }.get(kind if kind != "ssm_norm" else "")
    side_by_side = partial(_side_by_side, keys=keys, values=values)
    first = 2 * keys * size
    changes: dict[str, Change] = {
        "attn_qkv": lambda rows: torch.cat([rows[:first], side_by_side(rows[first:], value_size)]),
        "attn_gate": lambda rows: side_by_side(rows, value_size),
        "ssm_out": lambda matrix: side_by_side(matrix.T, value_size).T,
        "ssm_alpha": lambda rows: side_by_side(rows, 1),
        "ssm_beta": lambda rows: side_by_side(rows, 1),
        "ssm_dt": lambda numbers: side_by_side(numbers, 1),
        "ssm_a": lambda numbers: side_by_side((-numbers).log(), 1),
    }
    changes["ssm_conv1d"] = lambda rows: changes["attn_qkv"](rows)[:, None]
    return changes.get(kind)


def _half_of_pairs(rows: Tensor, which: int, *, keys: int) -> Tensor:
    """Return the rows of projection `which`. For each key head, `rows` has those of projection 0,
    then as many of projection 1."""
    return rows.reshape(keys, 2, -1, *rows.shape[1:])[:, which].flatten(0, 1)


def _side_by_side(rows: Tensor, size: int, *, keys: int, values: int) -> Tensor:
    """Put the value heads of each key head side by side. rows: [values * size, ...], the first
    value head of each key head, then the second of each, and so on."""
    heads = rows.reshape(values // keys, keys, size, *rows.shape[1:])
    return heads.transpose(0, 1).reshape(rows.shape)
