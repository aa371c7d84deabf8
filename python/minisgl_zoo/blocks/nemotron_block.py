"""Nemotron-H's blocks: Mamba2 or attention, then an MLP of squared ReLU, a mixture or nothing.

A file counts an MLP or a mixture as a layer of its own. Here it belongs to the block of the layer
before it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.nn.functional as F

from minisgl.layers import (
    BaseOP,
    LinearColParallelMerged,
    LinearRowParallel,
    RMSNormFused,
    StateLessOP,
)
from minisgl.models.decoder import Block
from minisgl.models.spec import layers_of
from minisgl_zoo.blocks.mamba2 import MambaSpec, letter_of, mixer

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.models.config import ModelConfig
    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import LayerSpec, ModelSpec
    from minisgl_zoo.layers.mamba2 import Mamba2


def layer_kinds(config: ModelConfig) -> str:
    """Return a letter for each layer of the file: M (Mamba2), * (attention), - (MLP), E (mixture).
    Raises ConfigError for another letter, and for an MLP or a mixture that does not follow Mamba2
    or attention."""
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
    """Return the indices of the file's layers that begin a block."""
    return [index for index, kind in enumerate(kinds) if kind in "M*"]


def nemotron_layers(config: ModelConfig, kinds: str) -> tuple[LayerSpec, ...]:
    """Return the blocks' layers. kinds: see `layer_kinds`. Raises ConfigError."""
    fields = config.fields
    for name, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if fields.values.get(name, only) != only:
            raise fields.error(name, only)
    if not fields.flag("use_conv_bias", True):
        raise fields.error("use_conv_bias", "true: convolutions without a bias are not served")
    mamba = MambaSpec(
        value_dim=fields.integer("mamba_head_dim"),
        taps=fields.integer("conv_kernel", minimum=2),
        fused=False,
        bias=(bias := fields.flag("use_bias", False)),
        out_bias=bias,
    )
    num_heads, num_groups = fields.integer("mamba_num_heads"), fields.integer("n_groups")
    if num_heads % num_groups:
        raise fields.error("n_groups", f"a divisor of {num_heads} Mamba heads")

    def of_kind(layer: LayerSpec, kind: str) -> LayerSpec:
        if kind == "*":
            return replace(layer, block=MambaAttentionBlock)
        return replace(
            layer,
            num_heads=num_heads,
            num_kv_heads=num_groups,
            head_dim=fields.integer("ssm_state_size"),
            block=MambaBlock,
            recurrent=mamba,
        )

    layers = layers_of(config)
    return tuple(of_kind(layers[index], kinds[index]) for index in blocks_of(kinds))


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
    """norm, attention; if the file's next layer is an MLP or a mixture, then norm and that
    layer."""

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
