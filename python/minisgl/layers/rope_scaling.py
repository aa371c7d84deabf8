"""RoPE scaling: stretches rotary embedding to longer contexts.

Each type maps the plain frequencies to scaled ones. Formulas and rounding (float32) are those of
Hugging Face's `ROPE_INIT_FUNCTIONS`, for which checkpoints are made.

`dynamic` (NTK-aware, bloc97 and emozilla 2023) depends on the sequence's length in Hugging Face:
the rotation is computed again as the sequence grows, while cached keys keep theirs. Here requests
share cached keys, so a position must always have the same rotation. An engine that serves at most
the trained length uses the plain rotation, as Hugging Face does. An engine that serves longer
contexts uses the rotation for that length at all positions, and logs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.layers.rotary import RotaryConfig, plain
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def _linear(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """Positions are divided by `factor` (Chen et al. 2023; kaiokendev)."""
    return plain(config.theta, config.rotary_dim) / config.factor, 1.0


def _dynamic(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    length, dim = max(num_positions, config.max_position), config.rotary_dim
    stretch = config.factor * length / config.max_position - (config.factor - 1)
    return plain(config.theta * stretch ** (dim / (dim - 2)), dim), 1.0


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


def _longrope(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """A factor for each pair of dims, and a temperature (LongRoPE, Ding et al. 2024). One list of
    factors is for the original length, one for longer contexts. As with `dynamic`, the length that
    the engine serves decides for all positions; by default it is the original one."""
    is_long = num_positions > config.original_max_position
    if is_long:
        logger.info(
            "longrope: serving %d positions, more than the %d of training, so every position uses "
            "the long factors (Hugging Face does so only for sequences that grow beyond it)",
            num_positions,
            config.original_max_position,
        )
    factors = torch.tensor(config.long_factor if is_long else config.short_factor)
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    inv_freq = 1.0 / (factors * config.theta**exponents)
    if config.attention_factor is not None:
        return inv_freq, config.attention_factor
    if config.factor <= 1:
        return inv_freq, 1.0
    return inv_freq, math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))


def _proportional(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """Some of the pairs rotate, with the frequencies that they have if all rotate (Gemma 4)."""
    inv_freq = plain(config.theta, config.rotary_dim) / config.factor
    inv_freq[int(config.proportion * config.rotary_dim // 2) :] = 0
    return inv_freq, 1.0


def _none(config: RotaryConfig, num_positions: int) -> tuple[Tensor, float]:
    """No rotation: cosines of 1 and sines of 0, so that kernels need no special case."""
    return torch.zeros(config.rotary_dim // 2), 1.0


STRETCHED: dict[str, Callable[[RotaryConfig, int], tuple[Tensor, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "none": _none,
}
