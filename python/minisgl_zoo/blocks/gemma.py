"""Gemma's norms, whose weights are stored minus 1 or are left out, and its scaled embedding."""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl.layers import RMSNorm, RMSNormFused
from minisgl.layers.base import BaseOP, BuildContext
from minisgl.layers.norm import _Norm
from minisgl.models.blocks.decoder import Block
from minisgl.models.spec import ModelSpec
from minisgl_zoo.blocks.scaled import ScaledDecoder


class _PlusOne(_Norm):
    """A norm whose checkpoint holds its weight minus 1. The sum stays float32: rounded to bfloat16
    it would lose digits of the file, and logits would be up to 1.1 times as far from float32's."""

    def __init__(self, build: BuildContext, *, size: int, eps: float, name: str) -> None:
        super().__init__(replace(build, dtype=torch.float32), size=size, eps=eps, name=name)

    def init_buffers(self, device: torch.device) -> None:
        self.weight += 1


class GemmaNorm(_PlusOne, RMSNorm):
    """RMS norm that multiplies by 1 + the checkpoint's weight."""


class GemmaNormFused(_PlusOne, RMSNormFused):
    """`RMSNormFused` that multiplies by 1 + the checkpoint's weight."""


class UnitNorm(RMSNorm):
    """RMS norm without a weight."""

    def __init__(self, build: BuildContext, *, size: int, eps: float) -> None:
        BaseOP.__init__(self)
        self.ops, self.eps = build.ops, eps
        self.weight = torch.empty(size, dtype=build.dtype, device="meta")

    def init_buffers(self, device: torch.device) -> None:
        self.weight = torch.ones(self.weight.shape, dtype=self.weight.dtype, device=device)

    @property
    def num_buffer_bytes(self) -> int:
        return self.weight.nbytes


class GemmaBlock(Block):
    norm_type = GemmaNormFused


class GemmaDecoder(ScaledDecoder):
    """Embeddings are multiplied by the square root of the hidden size, rounded to their dtype, as
    in Hugging Face."""

    def __init__(
        self,
        spec: ModelSpec,
        build: BuildContext,
        num_positions: int,
        softcap: float | None = None,
    ) -> None:
        scale = torch.tensor(spec.config.hidden_size**0.5, dtype=build.dtype).item()
        super().__init__(spec, build, num_positions, embedding_scale=scale, softcap=softcap)
