"""What config.json says: the sizes that every family has, and typed access to all other fields."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minisgl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from minisgl.kernel.ops import Activation
    from minisgl.layers.rotary import RotaryConfig
    from minisgl.quantization import Formats


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a JSON object. An absent or null field has the value `default`, if given."""

    values: Mapping[str, Any]
    where: str

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._value(name, default)
        if type(value) is not int or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        if value >= 2**31:
            raise self.error(name, "an integer below 2 ** 31")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Return the field, or None if it is null or absent."""
        return None if self.values.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.error(name, "a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def error(self, name: str, expected: str) -> ConfigError:
        if self.values.get(name) is None:
            return ConfigError(f"{self.where}: {name} is missing; expected {expected}")
        return ConfigError(f"{self.where}: {name} must be {expected}, got {self.values[name]!r}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a decoder.

    fields: all of config.json under our names of fields, with the family's defaults. dtype: of the
    checkpoint's tensors. formats: of its weights. is_wrapped: whether the decoder is the text model
    of a larger model. mtp: whether to build its layer of multi-token prediction
    (`minisgl.models.spec.NextTokens`).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    rope: RotaryConfig
    dtype: torch.dtype
    fields: Fields
    formats: Formats
    is_wrapped: bool = False
    mtp: bool = False

    @property
    def max_context(self) -> int:
        """The positions that the checkpoint was made for, with its RoPE scaling if it has one."""
        return self.rope.max_context

    @property
    def default_context(self) -> int:
        """The positions to serve unless more are asked for."""
        return self.rope.default_context
