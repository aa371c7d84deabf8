"""Weights of GGUF files that stay packed on a GPU.

They are loaded as the file's blocks, and become tiles (`minisgl_zoo.gguf.tiles`) on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.kernel.ops import Activation, Ops, rows_of_share
from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import Weight, WeightBuild
from minisgl_zoo.gguf.header import TYPE_OF
from minisgl_zoo.gguf.tiles import TILE_FORMS, TileProducts, pack_tiles

BLOCKS: Final = ".blocks"
"""The suffix of a checkpoint name that asks for a tensor's blocks, uint8 [O, bytes]. Under its
plain name the tensor is dequantised."""


def products_of(ops: Ops) -> type[TileProducts] | None:
    """Return the products of a GPU; None for other ops, and without a package that has them."""
    found: type[TileProducts] | None = plugins.find("ops", "tiles", ops=ops.name)
    return found


class TileWeight(Weight):
    """Matrices of one format, merged or in a stack. blocks: the file's, until they are tiles.
    products: the matrices of a stack are one below the other. shape: [O, I] or [L, O, I]."""

    blocks: Tensor
    products: TileProducts
    moe_backend = "tiles"

    def __init__(self, build: WeightBuild, kinds: Sequence[str]) -> None:
        """kinds: llama.cpp's name of each part's format, which is the same."""
        super().__init__(build)
        self.kind, self.form = kinds[0], TILE_FORMS[kinds[0]]
        self.declare(
            "blocks", torch.uint8, *[blocks_of(part, self.kind) for part in build.parts],
            rows=build.rows, stacked=build.stacked,
        )  # fmt: skip
        *stacked, self.outputs, row_bytes = self.blocks.shape
        self._inputs = row_bytes // TYPE_OF[self.kind].num_bytes * self.form.block
        self.shape = (*stacked, self.outputs, self._inputs)

    @property
    def num_buffer_bytes(self) -> int:
        """What tiles take more than blocks."""
        return self.form.num_bytes(math.prod(self.shape[:-1]), self._inputs) - self.blocks.nbytes

    def init_buffers(self, device: torch.device) -> None:
        products = products_of(self.ops)
        assert products, "made without kernels"
        tiles = pack_tiles(self.kind, self.blocks.view(-1, self.blocks.shape[-1]))
        self.products = products(self.ops, tiles)
        self.blocks = self.blocks.new_empty(0)

    def dense(self) -> Tensor:
        return self.products.dense().view(self.shape)

    def linear(
        self, x: Tensor, bias: Tensor | None = None, gate: Activation | None = None
    ) -> Tensor:
        y = self.products.linear(x.reshape(-1, self._inputs), bias, gate)
        return y.view(*x.shape[:-1], -1)

    def linear_into(self, x_MD: Tensor, bias: Tensor | None, out_MF: Tensor) -> None:
        self.products.linear_into(x_MD, bias, out_MF)

    def logits(self, x_SD: Tensor) -> Tensor:
        return self.products.logits(x_SD)

    def rows(self, ids_T: Tensor, share: range | None = None) -> Tensor:
        return rows_of_share(self.products.rows, ids_T, share)


def blocks_of(part: Part, kind: str) -> Part:
    """Return the share of the part's blocks, bytes of rows."""
    outputs, inputs = part.shape
    block, size = TYPE_OF[kind].block, TYPE_OF[kind].num_bytes
    share = part.share
    if part.axis == 1:
        share = range(share.start // block * size, share.stop // block * size)
    return replace(
        part,
        name=part.name + BLOCKS,
        shape=(outputs, inputs // block * size),
        share=share,
        alias=None,
        stack=None,
        unread=(*part.unread, part.name),
        stored=torch.uint8,
    )
