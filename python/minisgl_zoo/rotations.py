"""Rotations that no family of the core has, as `minisgl.layers.rotary` has the others."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from minisgl.layers.rotary import RotaryConfig, plain
from minisgl.models.config import Fields
from minisgl.models.loading.rotation import stretched, unstretched
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(RotaryConfig):
    """A factor for each pair of dims, and a temperature (LongRoPE, Ding et al. 2024). One list of
    factors is for the original length, one for longer contexts. As with `dynamic`, the length that
    the engine serves decides for all positions."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]

    @property
    def default_context(self) -> int:
        """The original length, because a longer one changes the rotation of every position."""
        return min(self.original_max_position, self.max_context)

    def frequencies(self, num_positions: int) -> tuple[Tensor, float]:
        is_long = num_positions > self.original_max_position
        if is_long:
            logger.info(
                "longrope: serving %d positions, more than the %d of training, so every position "
                "uses the long factors (Hugging Face does so only for sequences that grow beyond "
                "it)",
                num_positions,
                self.original_max_position,
            )
        factors = torch.tensor(self.long_factor if is_long else self.short_factor)
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        inv_freq = 1.0 / (factors * self.theta**exponents)
        if self.attention_factor is not None:
            return inv_freq, self.attention_factor
        if self.factor <= 1:
            return inv_freq, 1.0
        ratio = math.log(self.factor) / math.log(self.original_max_position)
        return inv_freq, math.sqrt(1 + ratio)


def longrope(config: Fields, rope: Fields, head_dim: int) -> LongRope:
    """Read `LongRope`, see `minisgl.models.loading.rotation.ReadRotation`."""
    read = unstretched(config, rope, "longrope", head_dim)
    read = stretched(read, rope, factor=read.max_position / read.original_max_position)
    num_pairs = read.rotary_dim // 2
    return LongRope(
        **asdict(read),
        short_factor=positive_numbers(rope, "short_factor", num_pairs),
        long_factor=positive_numbers(rope, "long_factor", num_pairs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportional(RotaryConfig):
    """Some of the pairs rotate, with the frequencies that they have if all rotate (Gemma 4)."""

    proportion: float

    def frequencies(self, num_positions: int) -> tuple[Tensor, float]:
        inv_freq = plain(self.theta, self.rotary_dim) / self.factor
        inv_freq[int(self.proportion * self.rotary_dim // 2) :] = 0
        return inv_freq, 1.0


def proportional(config: Fields, rope: Fields, head_dim: int) -> Proportional:
    """Read `Proportional`, see `minisgl.models.loading.rotation.ReadRotation`."""
    read = unstretched(config, rope, "proportional", head_dim, rotary_dim=head_dim)
    read = stretched(read, rope, factor=1.0)
    return Proportional(**asdict(read), proportion=rope.number("partial_rotary_factor", 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRotation(RotaryConfig):
    """Cosines of 1 and sines of 0, so that kernels need no special case."""

    def frequencies(self, num_positions: int) -> tuple[Tensor, float]:
        return torch.zeros(self.rotary_dim // 2), 1.0


def positive_numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Return the list `name`. Raises ConfigError if it is anything else than `count` positive
    numbers."""
    values = fields.values.get(name)
    if (
        type(values) is not list
        or len(values) != count
        or not all(type(x) in (int, float) and 0 < x <= sys.float_info.max for x in values)
    ):
        raise fields.error(name, f"a list of {count} positive numbers")
    return tuple(map(float, values))
