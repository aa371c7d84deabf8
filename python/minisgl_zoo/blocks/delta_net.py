"""A gated delta net (Yang et al., 2024), which replaces attention in Qwen's hybrids.

One projection computes queries, keys, values and an output gate z; another computes beta and the
decay. Queries, keys and values go through a short convolution and the gated delta rule
(`minisgl_zoo.recurrent.backend`), which use the layer's pool. The output is normed per head, gated,
and projected.

Heads are split over ranks like those of attention: a key head stays with the value heads that read
it, or with some of them.

Axes: T tokens, N value heads, K key heads, H key dim, V value dim, D inputs of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.layers.base import BuildContext
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.shard import HeadShare, split_heads, times
from minisgl.models.blocks.decoder import LayerBuild
from minisgl.quantization import PLAIN, Part
from minisgl_zoo.blocks.convolved import ConvolvedOP, shift
from minisgl_zoo.recurrent.backend import RecurrentInputs
from minisgl_zoo.recurrent.gates import create_gates
from minisgl_zoo.recurrent.spec import DeltaSpec


class Projections:
    """Where the checkpoint has the rows of both projections that belong to this rank's heads.

    This class is for the layout of Qwen3.5, a subclass for another layout.
    """

    def __init__(
        self, prefix: str, heads: HeadShare, totals: tuple[int, int], sizes: tuple[int, int, int]
    ) -> None:
        """prefix: begins the tensors' names. totals: (value heads, key heads) of all ranks. sizes:
        (key dim, value dim, hidden size)."""
        self.prefix, self.heads = prefix, heads
        self.num_heads, self.num_key_heads = totals
        self.key_dim, self.value_dim, self.hidden_size = sizes

    def _rows(self, name: str, count: int, share: range) -> Part:
        shape = (count, self.hidden_size)
        return Part(name=f"{self.prefix}.{name}.weight", shape=shape, axis=0, share=share)

    def qkvz(self) -> list[Part]:
        """Return the parts of queries, keys and values, which are in one tensor, and of z, which is
        another tensor."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        firsts = (0, keys, 2 * keys)
        qkv = [shift(share, first) for share, first in zip(self.conv(), firsts, strict=True)]
        z = self._rows("in_proj_z", values, times(self.heads.q, self.value_dim))
        return [*(self._rows("in_proj_qkv", 2 * keys + values, rows) for rows in qkv), z]

    def ba(self) -> list[Part]:
        """Return the parts of beta and of the decay."""
        names = ("in_proj_b", "in_proj_a")
        return [self._rows(name, self.num_heads, self.heads.q) for name in names]

    def conv(self) -> tuple[range, range, range]:
        """Return this rank's channels among those of the queries, the keys and the values."""
        keys = times(self.heads.kv, self.key_dim)
        return keys, keys, times(self.heads.q, self.value_dim)


class FusedProjections(Projections):
    """The layout of Qwen3-Next: one tensor has queries, keys, values and z, another one has beta
    and decay; both are ordered by key head."""

    def qkvz(self) -> list[Part]:
        group, key_dim, value_dim = self._group, self.key_dim, self.value_dim
        size = 2 * (key_dim + group * value_dim)
        count = self.num_key_heads * size
        parts = [
            range(head * size + first, head * size + first + key_dim)
            for first in (0, key_dim)
            for head in self.heads.kv
        ]
        for first in (2 * key_dim, 2 * key_dim + group * value_dim):
            parts += [shift(times(own, value_dim), head * size + first) for head, own in self._own]
        return [self._rows("in_proj_qkvz", count, rows) for rows in parts]

    def ba(self) -> list[Part]:
        group = self._group
        return [
            self._rows("in_proj_ba", 2 * self.num_heads, shift(own, head * 2 * group + first))
            for first in (0, group)
            for head, own in self._own
        ]

    @property
    def _group(self) -> int:
        return self.num_heads // self.num_key_heads

    @property
    def _own(self) -> list[tuple[int, range]]:
        """Return (key head, the range of its value heads that this rank has) for each key head of
        the rank. A key head's value heads are counted from 0."""
        group, q = self._group, self.heads.q
        return [
            (
                head,
                range(max(q.start - head * group, 0), min(q.stop - head * group, group)),
            )
            for head in self.heads.kv
        ]


class GatedDeltaNet(ConvolvedOP):
    a_log: Tensor
    dt_bias: Tensor

    def __init__(self, at: LayerBuild) -> None:
        super().__init__()
        build, layer, delta = at.build, at.layer, at.layer.recurrent
        assert isinstance(delta, DeltaSpec)
        num_heads, num_key_heads = layer.num_heads, layer.num_kv_heads
        key_dim, value_dim = layer.head_dim, delta.value_dim
        hidden_size, prefix = at.spec.config.hidden_size, f"{layer.prefix}.linear_attn"
        heads = split_heads(num_heads, num_key_heads, build.comm.size)[build.comm.rank]
        self.layer = delta.on_rank(layer, heads, at.place)
        parts = (FusedProjections if delta.fused else Projections)(
            prefix, heads, (num_heads, num_key_heads), (key_dim, value_dim, hidden_size)
        )
        self.declare_projections(build, parts)
        width = 2 * num_key_heads * key_dim
        firsts = (0, num_key_heads * key_dim, width)
        self.declare_conv(
            build,
            name=f"{prefix}.conv1d",
            spans=[shift(share, first) for share, first in zip(parts.conv(), firsts, strict=True)],
            size=(width + num_heads * value_dim, delta.taps),
        )
        for attr, name in (("a_log", "A_log"), ("dt_bias", "dt_bias")):
            part = Part(name=f"{prefix}.{name}", shape=(num_heads,), axis=0, share=heads.q)
            self.declare(attr, torch.float32, part)
        self.gates = create_gates(build.ops)
        self.norm = RMSNorm(
            build, size=value_dim, eps=at.spec.config.norm_eps, name=f"{prefix}.norm.weight"
        )
        in_size, share = num_heads * value_dim, times(heads.q, value_dim)
        self.out = at.back("linear_attn.out_proj", in_size=in_size, share=share)

    def declare_projections(self, build: BuildContext, parts: Projections) -> None:
        """Declare both projections as one weight if neither is quantised; then `ba` is None.
        Quantised checkpoints leave `ba` unquantised, so there it is a separate weight."""
        groups = [parts.qkvz(), parts.ba()]
        formats = [build.formats.of([part.module for part in group], "Linear") for group in groups]
        if all(format is PLAIN for format in formats):
            groups = [[*groups[0], *groups[1]]]
        self.qkvz = build.linear(*groups[0])
        self.ba = build.linear(*groups[1]) if len(groups) > 1 else None

    def forward(
        self,
        norm: RMSNormFused,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.forward`."""
        layer, width = self.layer, sum(self.layer.sizes)
        x_TD, residual_TD = norm.forward(x_TD, residual_TD)
        ends = [width, width + layer.num_heads * layer.value_dim]
        qkv, z, ba = self.qkvz.linear(x_TD).tensor_split(ends, dim=-1)
        if self.ba is not None:
            ba = self.ba.linear(x_TD)
        g_TN, beta_TN = self.gates.delta(ba, self.a_log, self.dt_bias)
        view = batch.pools[layer.pool]
        inputs = RecurrentInputs(x_TD=qkv, g_TN=g_TN, beta_TN=beta_TN, weight_WD=self.conv)
        out_TNV = view.context.attn.forward(inputs, layer, view)
        residual_TD, out_TNV, z = norm.select(rows_S, residual_TD, out_TNV, z)
        gated = self.gates.norm(out_TNV, self.norm.weight, self.norm.eps, z)
        return self.out.forward(gated), residual_TD
