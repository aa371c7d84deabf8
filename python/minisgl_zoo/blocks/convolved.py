"""The base of layers with a causal convolution of a few taps per channel.

Axes: T tokens, D channels of this rank, W taps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from minisgl.layers.base import BaseOP, BuildContext
from minisgl.quantization import Part


class ConvolvedOP(BaseOP):
    """conv: [W, D], the layout that the backends read. conv_bias: [D] or None."""

    conv: Tensor
    conv_bias: Tensor | None = None

    def declare_conv(
        self, build: BuildContext, *, name: str, spans: Iterable[range], size: tuple[int, int],
        bias: bool = False,
    ) -> None:  # fmt: skip
        """Declare the tensors of the convolution `name`. spans: this rank's channels, in order.
        size: (channels of all ranks, taps)."""
        width, taps = size
        shapes: dict[str, tuple[int, ...]] = {"weight": (width, 1, taps)}
        if bias:
            shapes["bias"] = (width,)
        spans = tuple(spans)
        for attr, (kind, shape) in zip(("conv", "conv_bias"), shapes.items(), strict=False):
            parts = (Part(name=f"{name}.{kind}", shape=shape, axis=0, share=s) for s in spans)
            self.declare(attr, build.dtype, *parts)

    def init_buffers(self, device: torch.device) -> None:
        self.conv = self.conv[:, 0].T.contiguous()


def shift(span: range, by: int) -> range:
    """Return the span `by` elements further on."""
    return range(span.start + by, span.stop + by)
