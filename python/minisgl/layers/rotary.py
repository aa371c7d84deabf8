"""Rotary position embedding (RoFormer, Su et al. 2021).

A table of cosines and sines per position is computed once, so a step only looks up. Rounding
(float32) follows Hugging Face. `minisgl.layers.frequencies` has the frequencies.

Axes: T tokens, N query heads, K key/value heads, H head dim, P positions, R rotary dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.layers.base import BuildContext, StateLessOP
from minisgl.layers.frequencies import RotaryConfig
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


class RotaryEmbedding(StateLessOP):
    """The table for `num_positions` positions. cos_sin: float32 [P, R], cosines then sines."""

    cos_sin: Tensor

    def __init__(self, build: BuildContext, config: RotaryConfig, num_positions: int) -> None:
        super().__init__()
        self.ops, self.config = build.ops, config
        self.cos_sin = torch.empty(num_positions, config.rotary_dim, device="meta")

    def init_buffers(self, device: torch.device) -> None:
        num_positions = len(self.cos_sin)
        inv_freq, scale = self.config.frequencies(num_positions)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
        self.cos_sin = (torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).to(device)

    @property
    def num_buffer_bytes(self) -> int:
        return self.cos_sin.nbytes

    def forward(self, q_TNH: Tensor, k_TKH: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.apply_rope(q_TNH, k_TKH, self.cos_sin, positions_T)


def get_rope(build: BuildContext, config: RotaryConfig, num_positions: int) -> RotaryEmbedding:
    """Return the rotary embedding for `config`. Layers with equal configs use the same one."""
    if config.rope_type == "dynamic" and num_positions > config.max_position:
        logger.warning(
            "dynamic rope: serving %d positions, more than the %d of training, so every position "
            "is rotated for the longer length (Hugging Face does so only for sequences that grow "
            "beyond it)",
            num_positions,
            config.max_position,
        )
    return RotaryEmbedding(build, config, num_positions)
