"""What makes one decoder differ from another, as data.

A value that differs between families is a field here; the decoder reads it and never asks which
family it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.layers.moe import ExpertNames
    from minisgl.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts in some layers.

    is_sparse: for each layer whether it has the mixture, or an MLP as wide as config.json says.
    inner_size: of an expert; shared_size: of the expert that every token takes, 0 for none.
    renormalise: see `Ops.route`. names: of layer {}'s tensors.
    """

    num_experts: int
    top_k: int
    inner_size: int
    renormalise: bool
    is_sparse: tuple[bool, ...]
    names: Callable[[int], ExpertNames]
    shared_size: int = 0


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
    moe: MoeSpec | None = None

    @property
    def mlp_width(self) -> int:
        """Elements that a token takes between a block's norm and its sum, at most."""
        widths = [3 * self.config.intermediate_size]
        if self.moe:
            pair = 2 * self.moe.inner_size + self.config.hidden_size
            widths.append(self.moe.top_k * pair + 3 * self.moe.shared_size)
        return max(widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the config.json of some architectures.

    defaults: what a field means that is not in the file, as in Hugging Face's config class.
    """

    architectures: tuple[str, ...]
    spec: Callable[[ModelConfig], ModelSpec]
    defaults: Mapping[str, Any] = field(default_factory=dict)
