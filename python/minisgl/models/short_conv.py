"""Short convolutions in the place of attention: the part of a spec, and the block.

Imported only by families that have such layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from minisgl.core.groups import CacheGroup
from minisgl.layers.shard import split_heads, times
from minisgl.layers.short_conv import ShortConv
from minisgl.models.decoder import Block
from minisgl.models.spec import PoolSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """A gated short convolution.

    In its `LayerSpec` num_heads and num_kv_heads are equal: ranks share the channels in so many
    units of head_dim channels. taps: the length of the convolution. bias: whether it has one.
    """

    taps: int
    bias: bool

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return (CacheGroup(kind="window", window=self.taps),)

    def width(self, layer: LayerSpec) -> int:
        """As `LayerSpec.width`: b, c, x and their product. The float32 sum takes no more."""
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

    def page_bytes(self, group: int, page_size: int, dtype: torch.dtype) -> int:
        per_token = self.num_layers * self.width * dtype.itemsize
        return per_token * page_size if group == self.group else 0


class ConvBlock(Block):
    @staticmethod
    def attention_type(at: LayerBuild) -> ShortConv:
        layer, conv, comm = at.layer, at.layer.recurrent, at.build.comm
        assert isinstance(conv, ConvSpec)
        heads = split_heads(layer.num_heads, layer.num_kv_heads, comm.size)[comm.rank]
        return ShortConv(
            at.build,
            prefix=f"{layer.prefix}.conv",
            hidden_size=at.spec.config.hidden_size,
            channels=times(heads.kv, layer.head_dim),
            taps=conv.taps,
            bias=conv.bias,
            place=at.place,
        )
