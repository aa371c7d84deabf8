"""A gated short convolution, which replaces attention in LFM2.

One projection computes b, c and x. b * x goes through a causal convolution of a few taps, channel
by channel; its output, times c, is projected.

Channels are split over ranks in units of a head.

Axes: T tokens, D hidden size, W taps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.layers.base import BuildContext
from minisgl.layers.linear import Linear, LinearRowParallel
from minisgl.layers.norm import RMSNormFused
from minisgl.quantization import Part
from minisgl_zoo.layers.convolved import ConvolvedOP, shift

if TYPE_CHECKING:
    from minisgl.core import Batch


class ShortConv(ConvolvedOP):
    def __init__(
        self,
        build: BuildContext,
        *,
        prefix: str,
        hidden_size: int,
        channels: range,
        taps: int,
        bias: bool,
        place: tuple[int, int],
    ) -> None:
        """prefix: begins the tensors' names. channels: this rank's share. bias: whether projections
        and convolution have biases. place: (the layer's pool, its index in that pool)."""
        super().__init__()
        self.pool, self.layer_id = place
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
        self.declare_conv(
            build, name=f"{prefix}.conv", spans=(channels,), size=(hidden_size, taps), bias=bias
        )
        self.out = LinearRowParallel(
            build,
            in_size=hidden_size,
            share=channels,
            out_size=hidden_size,
            bias=bias,
            name=f"{prefix}.out_proj",
        )

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
        b_TD, c_TD, x_TD = projected.chunk(3, dim=-1)
        view = batch.pools[self.pool]
        layer = view.context.kv_pool.layer(self.layer_id)
        mixed = view.context.attn.forward(b_TD * x_TD, self.conv, self.conv_bias, layer, view)
        residual_TD, mixed, c_TD = norm.select(rows_S, residual_TD, mixed, c_TD)
        return self.out.forward(c_TD * mixed), residual_TD
