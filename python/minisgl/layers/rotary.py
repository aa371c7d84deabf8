"""Rotary position embedding (RoFormer, Su et al. 2021) and the ways to stretch it.

Each type is a rule that turns the base frequencies into stretched ones; a table of cosines and
sines per position is computed once, so a step only looks up. Formulas and rounding (float32) are
those of Hugging Face's `ROPE_INIT_FUNCTIONS`, which checkpoints are written for.

`dynamic` (NTK-aware, bloc97 and emozilla 2023) depends on the length of the sequence there: it is
computed anew as the sequence grows, while cached keys stay as they were rotated. With a cache that
requests share, a position must have one rotation. So: up to the trained length it is the plain
one, as there; an engine that is told to serve longer contexts uses the rotation for that length
at all positions and says so in its log.

Axes: T tokens, N query heads, K key/value heads, H head dim, P positions, R rotary dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.layers.base import BuildContext, StateLessOP
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Named as in Hugging Face's `rope_parameters`; a type ignores what is not its own.

    rotary_dim: how many of a head's dims rotate, even. max_position: `max_position_embeddings`.
    original_max_position: the length before stretching, `max_position` where none is given.
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
        """Positions that the checkpoint is meant for.

        Hugging Face's convention is that `max_position_embeddings` is not multiplied for `linear`,
        may be for `yarn`, and is for `llama3`. `dynamic` stays within the trained length.
        """
        if self.rope_type == "linear":
            return int(self.max_position * self.factor)
        if self.rope_type == "yarn":
            return max(self.max_position, int(self.original_max_position * self.factor))
        return self.max_position


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
    """The rotation that all layers of a model share."""
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
    """(radians per position of each pair of dims, float32 [R/2]; what multiplies cos and sin)."""
    return ROPE_TYPES[config.rope_type](config, num_positions)


def _plain(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return torch.as_tensor(1.0 / (theta**exponents))


def _default(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    return _plain(config.theta, config.rotary_dim), 1.0


def _linear(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """Positions squeezed by `factor` (Chen et al. 2023; kaiokendev)."""
    return _plain(config.theta, config.rotary_dim) / config.factor, 1.0


def _dynamic(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    length, dim = max(num_positions, config.max_position), config.rotary_dim
    stretch = config.factor * length / config.max_position - (config.factor - 1)
    return _plain(config.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones are not, those between are blended (Llama 3.1)."""
    inv_freq = _plain(config.theta, config.rotary_dim)
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
        """The dim that turns this often over the original length."""
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = dim_of(config.beta_fast), dim_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # as Hugging Face avoids the division by zero
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


ROPE_TYPES: dict[str, Callable[[RotaryConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
