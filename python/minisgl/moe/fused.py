"""The experts on a GPU: `minisgl.kernel.triton.moe`, with tiles that were measured.

A pair is a token and one of its experts. `minisgl_kernels.moe` is faster with few tokens, and on
Hopper with many.

`tuned.json` has the fastest tiles for each device, for each size of an expert's matrices on a rank,
and for ranges of the tokens that an expert gets on average. `python -m minisgl_bench.studies moe
--tune` makes it (docs/gpus.md). Other devices and sizes use `DEFAULT`, and the log says so once.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton import moe, moe_route
from minisgl.kernel.triton.moe import Gate, Gemm, Tile
from minisgl.moe.base import BaseMoeBackend, ClampedGate, Experts
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

TUNED = Path(__file__).parent / "tuned.json"

Tiles = tuple[Tile, Tile]
"""Tiles of the GEMM with gate and up, and of that with down; both hold the same pairs."""
Tuned = tuple[tuple[float, Tiles], ...]
"""(the most tokens that an expert gets on average, tiles), ascending. The last tiles are also for
more tokens."""


def tiles(m: int, up: tuple[int, ...], down: tuple[int, ...]) -> Tiles:
    """Return tiles of m pairs. up, down: (outputs, inputs, warps, stages)."""
    first, second = (
        Tile(m=m, n=n, k=k, warps=warps, stages=stages) for n, k, warps, stages in (up, down)
    )
    return first, second


# These fit 100 KB of shared memory, which every GPU since 2020 has.
DEFAULT: Tuned = (
    (8, tiles(16, (32, 128, 4, 3), (64, 128, 4, 3))),
    (32, tiles(32, (32, 128, 4, 3), (64, 128, 4, 3))),
    (64, tiles(64, (64, 64, 4, 3), (128, 64, 4, 3))),
    (128, tiles(128, (64, 64, 8, 3), (128, 64, 8, 3))),
)
EXACT: Tuned = ((0, tiles(16, (32, 32, 4, 2), (32, 32, 4, 2))),)
"""For float32, whose GEMMs use no tensor cores. Not tuned for speed."""


class FusedMoeBackend(BaseMoeBackend):
    """Mutable: a cache of the entries of `tuned.json`."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self._tuned: dict[tuple[int, int], Tuned] = {}

    def forward(self, x_TD: Tensor, logits_TE: Tensor, experts: Experts) -> Tensor:
        counts_L = _empty_counts(x_TD, experts)
        weights_TK, ids_TK = moe_route.route(
            logits_TE, experts.top_k, experts.renormalise, counts_L, experts.scale
        )
        return self._routed(x_TD, weights_TK, ids_TK, experts, counts_L)

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        counts_L = _empty_counts(x_TD, experts)
        return self._routed(x_TD, weights_TK, ids_TK, experts, counts_L.zero_())

    def _routed(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        experts: Experts,
        counts_L: Tensor,
    ) -> Tensor:
        weights = (experts.gate_up_LGD, experts.down_LDF)
        mean = len(x_TD) * experts.top_k / experts.total
        up, down = self._gemms(x_TD, experts, mean)
        return moe.experts(
            x_TD, *weights, weights_TK, ids_TK, experts.first, counts_L, up=up, down=down
        )

    def _gemms(self, x_TD: Tensor, experts: Experts, mean: float) -> tuple[Gemm, Gemm]:
        """Return the GEMMs of gate and up, and of down. mean: pairs of an expert, on average."""
        up, down = self._tiles(x_TD, experts, mean)
        return (
            partial(moe.grouped_gemm, tile=up, gate=gate_of(experts), bias=experts.gate_up_bias),
            partial(moe.grouped_gemm, tile=down, bias=experts.down_bias),
        )

    def _tiles(self, x_TD: Tensor, experts: Experts, mean: float) -> Tiles:
        hidden, inner = experts.down_LDF.shape[1:]
        if x_TD.dtype == torch.float32:
            tuned = EXACT
        else:
            if (hidden, inner) not in self._tuned:
                self._tuned[hidden, inner] = load_tiles(hidden, inner, x_TD.device)
            tuned = self._tuned[hidden, inner]
        return next((chosen for most, chosen in tuned if mean <= most), tuned[-1][1])


def gate_of(experts: Experts) -> Gate:
    """Return the activation as the kernels take it."""
    if isinstance(experts.activation, ClampedGate):
        return Gate(alpha=experts.activation.alpha, limit=experts.activation.limit)
    return Gate(is_gelu=experts.activation == "gelu_tanh", is_squared=experts.is_squared)


def _empty_counts(x_TD: Tensor, experts: Experts) -> Tensor:
    return torch.empty(experts.count, dtype=torch.int32, device=x_TD.device)


def load_tiles(hidden: int, inner: int, device: torch.device) -> Tuned:
    """Return the tiles that were tuned for experts of [inner, hidden] on this device, or
    `DEFAULT`."""
    if device.type == "cpu":
        return DEFAULT  # Triton's interpreter
    name, size = torch.cuda.get_device_name(device), f"{hidden}x{inner}"
    rows = json.loads(TUNED.read_text()).get(name, {}).get(size)
    if rows is None:
        logger.info(
            "moe: no tiles were tuned for experts of %s on %s; using defaults (docs/gpus.md says "
            "how to tune them)",
            size,
            name,
        )
        return DEFAULT
    return tuple((most, tiles(m, tuple(up), tuple(down))) for most, m, up, down in rows)
