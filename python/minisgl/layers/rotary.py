"""Rotary position embedding (RoFormer, Su et al. 2021), and RoPE scaling, which stretches its
frequencies to longer contexts.

A table of cosines and sines per position is computed once, so a step only looks up.

Each type maps the plain frequencies to scaled ones. Formulas and rounding (float32) are those of
Hugging Face's `ROPE_INIT_FUNCTIONS`, for which checkpoints are made.

`dynamic` (NTK-aware, bloc97 and emozilla 2023) stretches beyond the trained length only, and as the
sequence grows. An engine serves at most the trained length of such a checkpoint (requests share
cached keys, so a position must always have the same rotation): the rotation is the plain one.

Axes: T tokens, N query heads, K key/value heads, H head dim, P positions, R rotary dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.layers.base import BuildContext, StateLessOP


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Fields are named as in Hugging Face's `rope_parameters`; each type reads some of them.

    rope_type: one of ROPE_TYPES, or that of a subclass. rotary_dim: the dims of a head that rotate,
    an even number. max_position: `max_position_embeddings`. original_max_position: the length
    before stretching; `max_position` if config.json has none.
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
        """The positions to serve unless more are asked for."""
        return self.max_context

    def frequencies(self, num_positions: int) -> tuple[Tensor, float]:
        """Return (radians per position of each pair of dims, float32 [R/2]; the factor of cosines
        and sines). num_positions: those that are served."""
        return FREQUENCIES[self.rope_type](self, num_positions)


def plain(theta: float, rotary_dim: int) -> Tensor:
    """Return the frequencies of RoFormer, radians per position, float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return torch.as_tensor(1.0 / (theta**exponents))


def _default(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    return plain(config.theta, config.rotary_dim), 1.0


def _linear(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """Positions are divided by `factor` (Chen et al. 2023; kaiokendev)."""
    return plain(config.theta, config.rotary_dim) / config.factor, 1.0


def _llama3(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """Long waves are stretched, short waves are not, and waves between are blended (Llama 3.1)."""
    inv_freq = plain(config.theta, config.rotary_dim)
    wavelen = 2 * math.pi / inv_freq
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = (config.original_max_position / wavelen - low) / (high - low)
    blended = (1 - blend) * inv_freq / config.factor + blend * inv_freq
    stretched = torch.where(
        wavelen > config.original_max_position / low, inv_freq / config.factor, blended
    )
    short = wavelen < config.original_max_position / high
    return torch.where(short, inv_freq, stretched), 1.0


def _yarn(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """A ramp over the dims from plain to stretched, and a temperature (YaRN, Peng et al. 2023)."""
    dim, theta = config.rotary_dim, config.theta

    def dim_of(rotations: float) -> float:
        """Return the dim whose pair rotates this many times over the original length."""
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = dim_of(config.beta_fast), dim_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # Hugging Face's number, which avoids a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    inv_freq = 1.0 / (config.factor * powers) * ramp + 1.0 / powers * (1 - ramp)
    return inv_freq, _yarn_scale(config)


def _yarn_scale(config: RotaryConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


FREQUENCIES: dict[str, Callable[[RotaryConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
ROPE_TYPES = tuple(FREQUENCIES)


class RotaryEmbedding(StateLessOP):
    """The table for `num_positions` positions. cos_sin: float32 [P, R], cosines then sines.
    by_place: a token's position is its place in the request (`minisgl_zoo.vision.turns`)."""

    cos_sin: Tensor
    by_place: bool = True

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
    """Return the rotary embedding for `config`."""
    return RotaryEmbedding(build, config, num_positions)
