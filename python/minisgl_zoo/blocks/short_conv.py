"""A gated short convolution, which replaces attention in LFM2.

One projection computes b, c and x. b * x goes through a causal convolution of a few taps, channel
by channel; its output, times c, is projected. Channels are split over ranks in units of a head.

Axes: T tokens, D hidden size, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from minisgl.core import Batch, Context
from minisgl.core.groups import CacheGroup
from minisgl.layers.linear import Linear
from minisgl.layers.norm import RMSNormFused
from minisgl.layers.shard import split_heads, times
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import FULL, types_in_config
from minisgl.models.spec import LayerSpec, PoolBuild, PoolSpec, layers_of
from minisgl.quantization import Part
from minisgl_zoo.blocks.convolved import ConvolvedOP, shift
from minisgl_zoo.cache_groups.groups import WindowGroup
from minisgl_zoo.recurrent.short_conv import ConvPool, create_conv_backend


class ShortConv(ConvolvedOP):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__()
        build, layer, conv = at.build, at.layer, at.layer.recurrent
        assert isinstance(conv, ConvSpec)
        heads = split_heads(layer.num_heads, layer.num_kv_heads, build.comm.size)[build.comm.rank]
        channels, bias = times(heads.kv, layer.head_dim), conv.bias
        hidden_size, prefix = at.spec.config.hidden_size, f"{layer.prefix}.conv"
        self.pool, self.layer_id = at.place
        shape = (3 * hidden_size, hidden_size)
        name = f"{prefix}.in_proj.weight"
        self.projection = Linear(
            build,
            *(
                Part(name=name, shape=shape, axis=0, share=shift(channels, index * hidden_size))
                for index in range(3)
            ),
            bias=bias,
        )
        size = hidden_size, conv.taps
        self.declare_conv(build, name=f"{prefix}.conv", spans=(channels,), size=size, bias=bias)
        self.out = at.back("conv.out_proj", in_size=hidden_size, share=channels, bias=bias)

    def forward(
        self,
        norm: RMSNormFused,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.forward`."""
        projected, residual_TD = self.projection.forward_normed(norm, x_TD, residual_TD)
        view = batch.pools[self.pool]
        layer = view.context.kv_pool.layer(self.layer_id)
        mixed = view.context.attn.forward(projected, self.conv, self.conv_bias, layer, view)
        residual_TD, mixed = norm.select(rows_S, residual_TD, mixed)
        return self.out.forward(mixed), residual_TD


CONV = "conv"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """A gated short convolution.

    In its `LayerSpec` num_heads and num_kv_heads are equal: the number of units, of head_dim
    channels each, that are split over the ranks. taps: the length of the convolution. bias: whether
    projections and convolution have biases.
    """

    taps: int
    bias: bool

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return (WindowGroup(window=self.taps),)

    def width(self, layer: LayerSpec) -> int:
        """See `LayerSpec.width`: b, c, x and their product. The float32 sum takes no more."""
        return 4 * layer.num_heads * layer.head_dim

    def pool(self, layer: LayerSpec, groups: Sequence[CacheGroup]) -> PoolSpec:
        return ConvPoolSpec(
            group=groups.index(self.groups[0]),
            num_layers=0,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvPoolSpec(PoolSpec):
    """Layers that keep one input of a convolution for each token and channel."""

    is_recurrent: ClassVar[bool] = True

    @property
    def width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def context(self, build: PoolBuild) -> Context:
        """See `PoolSpec.context`."""
        return Context(
            kv_pool=ConvPool(
                num_layers=self.num_layers,
                num_pages=build.groups[self.group].num_pages,
                page_size=build.page_size,
                width=self.width,
                dtype=build.dtype,
                device=build.device,
            ),
            page_table=build.page_table(self.group),
            attn=create_conv_backend(build.attn, build.ops, build.device, build.page_size),
        )

    def guarded(self, layer: Any, groups: Sequence[CacheGroup]) -> list[tuple[int, Tensor]]:
        """See `PoolSpec.guarded`."""
        return [(self.group, layer.pages)]

    def page_bytes(self, group: int, page_size: int, dtype: torch.dtype) -> int:
        per_token = self.num_layers * self.width * dtype.itemsize
        return per_token * page_size if group == self.group else 0


class ConvBlock(Block):
    attention_type = ShortConv


def conv_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of a model with short convolutions and attention.

    The field `layer_types` says which is where. Without it, the layers `full_attn_idxs` have
    attention, or all. Raises ConfigError.
    """
    fields, count = config.fields, config.num_layers
    types = types_in_config(config, (FULL, CONV))
    if types is None:
        full = fields.values.get("full_attn_idxs") or [*range(count)]
        if not isinstance(full, list):
            raise fields.error("full_attn_idxs", "a list of layers' numbers")
        types = tuple(FULL if index in full else CONV for index in range(count))
    return with_convs(config, layers_of(config), types)


def with_convs(
    config: ModelConfig,
    layers: Sequence[LayerSpec],
    types: Sequence[str],
    block: type[Block] = ConvBlock,
) -> tuple[LayerSpec, ...]:
    """Return `layers`, with a short convolution in each of type CONV.

    block: the class of these layers. Raises ConfigError.
    """
    fields = config.fields
    if FULL not in types:
        raise fields.error("layer_types", f"a list with one or more {FULL}")
    if config.hidden_size % config.num_heads:
        raise fields.error("num_attention_heads", f"a divisor of {config.hidden_size} channels")
    conv = ConvSpec(
        taps=fields.integer("conv_L_cache", minimum=2), bias=fields.flag("conv_bias", False)
    )
    conv_fields: dict[str, Any] = {
        "num_kv_heads": config.num_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "block": block,
        "recurrent": conv,
    }
    return tuple(
        replace(layer, **conv_fields) if kind == CONV else layer
        for layer, kind in zip(layers, types, strict=True)
    )
