"""What llama.cpp's files change in tensors, undone: see `change_of`.

Axes: K key heads, V value heads of a gated delta net.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from minisgl.models.interleaved import deinterleave

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.gguf_tensors import Change

PLUS_ONE: Final = ("gemma2", "gemma3", "qwen35", "qwen35moe")
"""Architectures whose files have 1 + the weight of each norm, but for the gated one."""

OF_COLUMNS: Final = ("ssm_out",)
"""Kinds of tensors whose columns are reordered, which blocks along a row do not survive."""


def change_of(arch: str, kind: str, config: ModelConfig) -> Change | None:
    """kind: of the tensor, such as attn_q. Returns None where nothing is changed.

    llama: the rows of q and k are in the order of interleaved pairs. Gemma and Qwen3.5: norms have
    1 + the weight. Qwen3.5: the value heads of all key heads take turns, where the checkpoint has
    those of a key head side by side; and the decay is -exp(A_log).
    """
    if arch == "llama" and kind in ("attn_q", "attn_k"):
        return partial(deinterleave, head_dim=config.head_dim, rotary_dim=config.head_dim)
    if arch in PLUS_ONE and kind.endswith("norm") and kind != "ssm_norm":
        return _minus_one
    return _of_delta_net(kind, config) if arch in ("qwen35", "qwen35moe") else None


def _minus_one(weight: Tensor) -> Tensor:
    return weight - 1


def _of_delta_net(kind: str, config: ModelConfig) -> Change | None:
    keys, values, size, value_size = (
        config.fields.integer(f"linear_{name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
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
        "ffn_gate_inp_shexp": lambda row: row.reshape(1, -1),
    }
    changes["ssm_conv1d"] = lambda rows: changes["attn_qkv"](rows)[:, None]
    return changes.get(kind)


def _side_by_side(rows: Tensor, size: int, *, keys: int, values: int) -> Tensor:
    """rows: [values * size, ...]: the first value head of each key head, then the second ones."""
    heads = rows.reshape(values // keys, keys, size, *rows.shape[1:])
    return heads.transpose(0, 1).reshape(rows.shape)
