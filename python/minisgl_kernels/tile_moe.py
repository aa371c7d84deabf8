"""Experts of GGUF files on a GPU, whose weights stay packed as tiles.

Each expert's pairs are computed 8 at a time by `tiles_few`. An expert with many pairs would be read
as often; so with many tokens some experts at a time are dequantised, and the GEMMs of plain experts
multiply by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from minisgl.kernel.ops import Activation, Ops
from minisgl.kernel.triton import moe
from minisgl.moe.base import Experts
from minisgl.moe.fused import FusedMoeBackend, gate_of
from minisgl.quantization import PlainWeight, Weight
from minisgl_kernels.grouped import GroupedGemms
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.moe import TunedMoeBackend
from minisgl_kernels.triton.moe_gate import activate_pairs
from minisgl_zoo.gguf.tile_weight import TileWeight
from minisgl_zoo.gguf.tiles import OUTPUTS, Pairs

UNGROUPED: Final = 4
"""Up to this many tokens each pair reads its expert for itself: few have one in common."""
MOST_PAIRS: Final = 40
"""Up to this many pairs of an expert, on average, tiles are decoded for each 8 of them."""
DENSE_NUMBERS: Final = 1 << 27
"""The weights of gate and up that are dequantised at a time: 256 MiB, and half as much for down."""


class TileMoeBackend(TunedMoeBackend):
    """Computes experts whose gate and up are tiles."""

    def _routed(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        experts: Experts,
        counts_L: Tensor,
    ) -> Tensor:
        if ids_TK.numel() <= MOST_PAIRS * experts.total:
            held = range(experts.first, experts.first + experts.count)
            pairs = Pairs(ids_TK, held)
            if len(x_TD) > UNGROUPED or isinstance(experts.down, PlainWeight):
                pairs = Pairs(ids_TK, held, counts_L, moe.place(ids_TK, counts_L, experts.first))
            act = _up(x_TD, pairs, experts)
            if act is not None and isinstance(experts.down, PlainWeight):
                return self._plain_down(act, weights_TK, pairs, experts)
            out = None if act is None else _product(experts.down, act, pairs, weights_TK)
            if out is not None:
                return moe.total(
                    out, weights_TK, ids_TK, experts.first, experts.count, experts.down_bias
                )
            counts_L.zero_()
        return self._dequantised(x_TD, weights_TK, ids_TK, experts, counts_L)

    def _plain_down(
        self, act: Tensor, weights_TK: Tensor, pairs: Pairs, experts: Experts
    ) -> Tensor:
        """Return the sums of each token's pairs. A rank's share of down is dequantised where it
        cuts blocks."""
        assert pairs.counts_L is not None
        assert pairs.rows_LT is not None
        down_LDF, ids_TK = experts.down_LDF, pairs.ids_TK
        out = act.new_empty((len(act), down_LDF.shape[1]))
        # Triton's: the choice for Hopper asks for plain gate and up, too.
        _, down = FusedMoeBackend._gemms(self, act, experts, ids_TK.numel() / experts.total)
        down(act, down_LDF, pairs.counts_L, pairs.rows_LT, weights_TK, out)
        return moe.total(out, weights_TK, ids_TK, experts.first, experts.count)

    def _dequantised(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        experts: Experts,
        counts_L: Tensor,
    ) -> Tensor:
        """Compute some experts at a time. counts_L: zeros."""
        rows_LT = moe.place(ids_TK, counts_L, experts.first)
        (_, outputs, hidden), (_, _, inner) = _shape(experts.gate_up), _shape(experts.down)
        act = x_TD.new_empty((ids_TK.numel(), inner))
        out = x_TD.new_empty((ids_TK.numel(), hidden))
        mean = ids_TK.numel() / experts.total
        each = max(DENSE_NUMBERS // (outputs * hidden), 1)
        for first in range(0, experts.count, each):
            part = slice(first, min(first + each, experts.count))
            some = replace(
                experts,
                gate_up=_dense(experts.gate_up, part),
                down=_dense(experts.down, part),
                gate_up_bias=None if experts.gate_up_bias is None else experts.gate_up_bias[part],
                down_bias=None if experts.down_bias is None else experts.down_bias[part],
                count=part.stop - part.start,
                first=experts.first + part.start,
            )
            up, down = self._gemms(x_TD, some, mean)
            counts, rows = counts_L[part], rows_LT[part]
            up(x_TD, some.gate_up_LGD, counts, rows, None, act)
            down(act, some.down_LDF, counts, rows, weights_TK, out)
            del some  # before the next are made
        return moe.total(out, weights_TK, ids_TK, experts.first, experts.count)


def _up(x_TD: Tensor, pairs: Pairs, experts: Experts) -> Tensor | None:
    """Return the activation of each pair, [T * K, F]; None if no kernel multiplies by these
    weights."""
    inner, gate = _shape(experts.down)[-1], experts.plain_gate
    if gate and inner % OUTPUTS == 0:
        return _product(experts.gate_up, x_TD, pairs, None, gate)
    both = _product(experts.gate_up, x_TD, pairs, None)
    if both is None or experts.is_squared:
        return both if both is None else both.relu_().square_()
    act = x_TD.new_empty((len(both), inner))
    bias_LG = experts.gate_up_bias
    activate_pairs(both, pairs.ids_TK, pairs.held, act, gate=gate_of(experts), bias_LG=bias_LG)
    return act


def _product(
    weight: Weight, x: Tensor, pairs: Pairs, scales: Tensor | None, gate: Activation | None = None
) -> Tensor | None:
    """See `TileProducts.experts`; None if no kernel multiplies by this weight."""
    if not isinstance(weight, TileWeight):
        return None
    outputs = weight.outputs // 2 if gate else weight.outputs
    out = x.new_empty((pairs.ids_TK.numel(), outputs))
    return out if weight.products.experts(x, pairs, scales, out, gate) else None


def _shape(weight: Weight) -> Sequence[int]:
    """The shape of a stack."""
    return weight.shape if isinstance(weight, TileWeight) else weight.dense().shape


def _dense(weight: Weight, part: slice) -> PlainWeight:
    """Return some matrices of a stack."""
    if not isinstance(weight, TileWeight):
        return PlainWeight.of(weight.ops, weight.dense()[part])
    rows = range(part.start * weight.outputs, part.stop * weight.outputs)
    return PlainWeight.of(weight.ops, weight.products.dense_rows(rows).view(-1, *weight.shape[1:]))


def create_backend(ops: Ops, dtype: torch.dtype) -> TileMoeBackend:
    """Return the backend of `ops` on the current GPU. dtype: see `create_moe_backend`."""
    otherwise = "Triton computes the experts' GEMMs of many rows"
    return TileMoeBackend(ops, on_hopper(partial(GroupedGemms, dtype), otherwise))
