"""Mamba2 in the place of attention, or beside it: what a spec says of it, and the blocks of
Nemotron-H and Falcon-H1.

A file of Nemotron-H counts MLPs as layers of their own. Here one belongs to the block of the layer
before it. A layer of Falcon-H1 caches in two places, so it is two layers here: the first one's
Mamba2 runs in the second one's block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch.nn.functional as F

from minisgl.layers import (
    BaseOP,
    LinearColParallelMerged,
    LinearRowParallel,
    RMSNormFused,
    StateLessOP,
)
from minisgl.layers.mamba2 import Mamba2
from minisgl.models.decoder import Block
from minisgl.models.post_norm import NoNorm
from minisgl.models.recurrent import INTERVAL, DeltaSpec
from minisgl.models.spec import CacheLayout

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Batch
    from minisgl.models.config import ModelConfig
    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import ModelSpec

KINDS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""A kind of layer in `layers_block_type` -> its letter in `hybrid_override_pattern`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(DeltaSpec):
    """Mamba2. `LayerSpec.num_heads` are its heads, `num_kv_heads` its groups, and `head_dim` is the
    size of a state. value_dim: of a head. bias, out_bias: of the projections. norm: of each group,
    after the gate or before it."""

    bias: bool
    out_bias: bool
    norm: Literal["after", "before", None] = "after"


def letter_of(kind: object) -> str:
    """Returns the letter of an entry of `layers_block_type`; "?" for one that is not known."""
    return KINDS.get(kind, "?") if isinstance(kind, str) else "?"


def layer_kinds(config: ModelConfig) -> str:
    """Returns a letter for each layer of the file: M (Mamba2), * (attention), - (MLP), E (mixture).
    Raises ConfigError for others, and where one of the last two follows none of the first two."""
    fields, name = config.fields, "hybrid_override_pattern"
    kinds = fields.values.get(name)
    if kinds is None:
        name = "layers_block_type"
        types = fields.values.get(name)
        kinds = "".join(map(letter_of, types)) if isinstance(types, list) else None
    if not isinstance(kinds, str) or not kinds or not {*kinds} <= {*"M*-E"}:
        raise fields.error(name, "the kinds of layers, as in M-M*-")
    if "*" not in kinds or re.search("(^|[-E])[-E]", kinds):
        raise fields.error(name, "one with attention, whose MLPs follow Mamba2 or attention")
    return kinds


def blocks_of(kinds: str) -> list[int]:
    """The layers of the file that begin a block."""
    return [index for index, kind in enumerate(kinds) if kind in "M*"]


class SquaredReluMLP(BaseOP):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, spec: ModelSpec, at: LayerBuild, prefix: str) -> None:
        super().__init__()
        config = spec.config
        self.up = LinearColParallelMerged(
            at.build,
            in_size=config.hidden_size,
            out_size=config.intermediate_size,
            bias=spec.mlp_bias,
            names=(f"{prefix}.up_proj",),
        )
        self.down = LinearRowParallel(
            at.build,
            in_size=config.intermediate_size,
            share=self.up.columns,
            out_size=config.hidden_size,
            bias=spec.mlp_bias,
            name=f"{prefix}.down_proj",
        )

    def forward(
        self, norm: RMSNormFused, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, then the MLP. Returns (output, residual)."""
        x_TF, residual_TD = self.up.forward_normed(norm, x_TD, residual_TD)
        return self.down.forward(F.relu(x_TF).square()), residual_TD


class NoMLP(StateLessOP):
    """Returns (x, residual)."""

    def forward(self, norm: object, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        return x_TD, residual_TD


class MambaAttentionBlock(Block):
    """norm, attention, and if the file's next layer is an MLP or a mixture: norm, this one."""

    def __init__(self, at: LayerBuild) -> None:
        BaseOP.__init__(self)
        before, _, index = at.layer.prefix.rpartition(".")
        self.attention_norm = at.norm(self.norm_type, "norm")
        self.attention = self.attention_type(at)
        self.mlp_norm = self.mlp = NoMLP()  # type: ignore[assignment] # takes the place of both
        follower = layer_kinds(at.spec.config)[int(index) + 1 :][:1]
        if follower not in ("-", "E"):
            return
        mlp = replace(at.layer, prefix=f"{before}.{int(index) + 1}")
        self.mlp_norm = replace(at, layer=mlp).norm(self.norm_type, "norm")
        if follower == "E":
            assert at.mixture
            self.mlp = at.mixture(at.index)
        else:
            self.mlp = SquaredReluMLP(at.spec, at, f"{mlp.prefix}.mixer")  # type: ignore[assignment] # has their `forward`


class MambaBlock(MambaAttentionBlock):
    @staticmethod
    def attention_type(at: LayerBuild) -> Mamba2:
        return mixer(at, "mixer")


def mixer(at: LayerBuild, name: str) -> Mamba2:
    """The layer's Mamba2. name: of its tensors."""
    spec, layer, mamba = at.spec, at.layer, at.layer.recurrent
    assert isinstance(mamba, MambaSpec)
    return Mamba2(
        at.build,
        prefix=f"{layer.prefix}.{name}",
        hidden_size=spec.config.hidden_size,
        num_heads=layer.num_heads,
        num_groups=layer.num_kv_heads,
        state_size=layer.head_dim,
        head_dim=mamba.value_dim,
        taps=mamba.taps,
        bias=mamba.bias,
        out_bias=mamba.out_bias,
        norm=mamba.norm,
        interval=INTERVAL,
        norm_eps=spec.config.norm_eps,
        place=at.place,
    )


class SidePlace(Block):
    """What caches for the Mamba2 of the next block. Returns what it gets."""

    def __init__(self, at: LayerBuild) -> None:
        BaseOP.__init__(self)

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return x_TD, residual_TD  # type: ignore[return-value] # None before the first norm


class SideBlock(Block):
    """norm, then Mamba2 and attention of the same input; norm, MLP."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        before = at.index - 1
        place = CacheLayout.of(at.spec.layers).places[before]
        self.mamba = mixer(replace(at, layer=at.spec.layers[before], place=place), "mamba")
        self.no_norm = NoNorm()

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_norm.forward(x_TD, residual_TD)
        if rows_S is not None:
            residual_TD = self.attention_norm.rows(residual_TD, rows_S, len(x_TD))
        mixed, _ = self.mamba.forward(self.no_norm, x_TD, None, batch, rows_S)
        attended, _ = self.attention.forward(self.no_norm, x_TD, None, batch, rows_S)
        return self.mlp.forward(self.mlp_norm, mixed + attended, residual_TD)
