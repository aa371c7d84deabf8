"""Launches the GEMMs by one matrix whose tiles blocks share (STREAM of `csrc/grouped_tiles.cuh`).

Axes: M rows, P inputs with padding, F outputs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from minisgl_kernels.grouped import BOX, STEP, Task, launch, shared_bytes
from minisgl_kernels.hopper import INPUTS, Kernels
from minisgl_kernels.triton.arrange import PERIOD

MOST_ROWS: Final = 128
"""Rows of x of a tile. One thread fetches, so that registers hold the sums of so many."""
LEAST_PARTS: Final = 4
"""The fewest parts of 128 inputs of a block, if several share the inputs of the matrix."""
LEAST_BUSY: Final = 5 / 6
"""The least share of the blocks that work where each tile has as many and none has parts of two."""


class Stream:
    """Mutable: memory for the sums that blocks exchange, of all products one after the other."""

    def __init__(self, kernels: Kernels[Any]) -> None:
        self._kernels = kernels
        self.partial: Tensor | None = None
        self.done: Tensor | None = None

    def take_memory(self, device: torch.device) -> None:
        """Take the memory, once, before a product is captured."""
        if self.partial is None or self.done is None:
            num_blocks = self._kernels.num_cores
            self.partial = torch.empty((2 * num_blocks, MOST_ROWS * 256), device=device)
            self.done = torch.zeros(num_blocks, dtype=torch.int32, device=device)

    def task(self, x_MP: Tensor, out_MF: Tensor, bias: Tensor | None) -> Task:
        """Return the task without what it says of the weight. Rows of `out` may have gaps between
        them."""
        assert self.partial is not None
        assert self.done is not None
        return Task(
            out=out_MF.data_ptr(), experts=1, stride=len(x_MP), share=_tile_rows(len(x_MP)),
            inputs=x_MP.shape[1], outputs=out_MF.shape[1], width=out_MF.stride(0),
            partial=self.partial.data_ptr(), done=self.done.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
        )  # fmt: skip

    def launch(
        self, kernel: int, weight_maps: tuple[bytes, ...], task: Task, x_MP: Tensor, rows: int,
        stage_bytes: int,
    ) -> None:  # fmt: skip
        """weight_maps: of numbers, and of the factors and scales of tiles. rows: of the weight.
        stage_bytes: of all stages."""
        library = self._kernels.library
        x_map = bytes(library.tensor_map(x_MP.data_ptr(), *x_MP.shape, task.share, 2, INPUTS))
        tiles = -(-len(x_MP) // MOST_ROWS) * -(-rows // (2 * BOX))
        parts = tiles * (x_MP.shape[1] // PERIOD)
        num_blocks = max(min(self._kernels.num_cores, parts // LEAST_PARTS), 1)
        whole = num_blocks // tiles * tiles
        num_blocks = whole if whole >= num_blocks * LEAST_BUSY else num_blocks
        needed = shared_bytes(stage_bytes, MOST_ROWS, 1, has_pairs=False)
        numbers, *others = weight_maps
        launch(self._kernels, kernel, (numbers, x_map, *others), task, needed, num_blocks)


def _tile_rows(rows: int) -> int:
    """Return the rows of a tile: all tiles have about as many."""
    tiles = -(-rows // MOST_ROWS)
    return -(-rows // (tiles * STEP)) * STEP
