"""What makes one decoder differ from another, as data.

A value that differs between families is a field here; the decoder reads it and never asks which
family it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder to build: what `config` says, and what its family adds.

    windows: for each layer how many keys a query sees, itself included; None is all.
    qk_norm: queries and keys are normed per head before they are rotated.
    """

    config: ModelConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the config.json of some architectures.

    defaults: what a field means that is not in the file, as in Hugging Face's config class.
    """

    architectures: tuple[str, ...]
    spec: Callable[[ModelConfig], ModelSpec]
    defaults: Mapping[str, Any] = field(default_factory=dict)
