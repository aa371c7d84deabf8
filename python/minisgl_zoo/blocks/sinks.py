"""Attention whose heads have sinks (`minisgl.attention.Sinks`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.layers.base import BaseOP, BuildContext
from minisgl.layers.shard import split_heads
from minisgl.models.decoder import Attention
from minisgl.quantization import Part

if TYPE_CHECKING:
    from minisgl.models.decoder import LayerBuild
    from minisgl.models.spec import LayerSpec


class HeadSinks(BaseOP):
    """The sinks of this rank's query heads."""

    weight: Tensor

    def __init__(self, build: BuildContext, layer: LayerSpec) -> None:
        super().__init__()
        heads = split_heads(layer.num_heads, layer.num_kv_heads, build.comm.size)[build.comm.rank]
        name, shape = f"{layer.prefix}.self_attn.sinks", (layer.num_heads,)
        self.declare("weight", torch.float32, Part(name=name, shape=shape, axis=0, share=heads.q))


class SinkAttention(Attention):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.sinks = HeadSinks(at.build, at.layer)
        self.attend.layer = replace(self.attend.layer, sinks=self.sinks)
