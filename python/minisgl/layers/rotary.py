"""Rotary position embedding (RoFormer, Su et al. 2021).

A table of cosines and sines per position is computed once, so a step only looks up. Rounding
(float32) follows Hugging Face. `minisgl.layers.rope_scaling` stretches the frequencies.

Axes: T tokens, N query heads, K key/value heads, H head dim, P positions, R rotary dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.layers.base import BuildContext, StateLessOP
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Fields are named as in Hugging Face's `rope_parameters`; each type reads some of them.

    rope_type: one of ROPE_TYPES, or "none" for layers without rotation. rotary_dim: the dims of a
    head that rotate, an even number. max_position: `max_position_embeddings`.
    original_max_position: the length before stretching; `max_position` if config.json has none.
    """

    rope_type: str = "default"
    theta: float
    rotary_dim: int
    max_position: int
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    proportion: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def max_context(self) -> int:
        """The positions that the checkpoint was made for.

        In Hugging Face's convention, `max_position_embeddings` does not include the factor for
        `linear`, may include it for `yarn`, and includes it for `llama3`. `dynamic` stays within
        the trained length.
        """
        if self.rope_type == "linear":
            return int(self.max_position * self.factor)
        if self.rope_type == "yarn":
            return max(self.max_position, int(self.original_max_position * self.factor))
        return self.max_position

    @property
    def default_context(self) -> int:
        """The positions to serve unless more are asked for: with `longrope` those before
        stretching, because a longer context changes the rotation of every position."""
        if self.rope_type == "longrope":
            return min(self.original_max_position, self.max_context)
        return self.max_context


class RotaryEmbedding(StateLessOP):
    """The table for `num_positions` positions. cos_sin: float32 [P, R], cosines then sines."""

    cos_sin: Tensor

    def __init__(self, build: BuildContext, config: RotaryConfig, num_positions: int) -> None:
        super().__init__()
        self.ops, self.config = build.ops, config
        self.cos_sin = torch.empty(num_positions, config.rotary_dim, device="meta")

    def init_buffers(self, device: torch.device) -> None:
        num_positions = len(self.cos_sin)
        inv_freq, scale = frequencies(self.config, num_positions)
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


def frequencies(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """Return (radians per position of each pair of dims, float32 [R/2]; the factor of cosines and
    sines)."""
    if config.rope_type == "default":
        return plain(config.theta, config.rotary_dim), 1.0
    from minisgl.layers.rope_scaling import STRETCHED

    return STRETCHED[config.rope_type](config, num_positions)


def plain(theta: float, rotary_dim: int) -> Tensor:
    """Return the frequencies of RoFormer, radians per position, float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return torch.as_tensor(1.0 / (theta**exponents))
