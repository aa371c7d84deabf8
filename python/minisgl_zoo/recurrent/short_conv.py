"""The pool and the backends of gated short convolutions, in plain torch and for a CPU in C++.

The pool keeps the inputs of the last tokens, in the pages of a window group. A token's convolution
reads the inputs of the W - 1 tokens before it, so the page at the end of a cached prefix has all
that the next token needs. The step's inputs are stored first. Then each token gathers the W - 1
inputs before its own through the page table, whether this step or an earlier one stored them.

Axes: T tokens of this step, B rows, P pages, Z page size, D channels on this rank, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnMetadata
from minisgl.core import Plan, PoolBatch
from minisgl.kernel.ops import Ops
from minisgl_zoo.recurrent.backend import library_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvLayer:
    """One layer's cache. inputs: [P * Z + 2, D]. The last entry but one is 0, the input before the
    first token. The last is written for tokens whose slot is -1, and never read."""

    inputs: Tensor
    page_size: int

    @property
    def pages(self) -> Tensor:
        """Inputs without the last two entries, [P, Z, D]."""
        return self.inputs[:-2].view(-1, self.page_size, self.inputs.shape[1])


class ConvPool:
    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages * page_size + 2, width)
        inputs = torch.empty(shape, dtype=dtype, device=device)
        inputs[:, -2:] = 0
        self._layers = [ConvLayer(inputs=layer, page_size=page_size) for layer in inputs]

    def layer(self, layer_id: int) -> ConvLayer:
        """Return the cache of one layer. The tensors never change."""
        return self._layers[layer_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvMetadata(BaseAttnMetadata):
    """has_prompts: a row may have several tokens."""

    has_prompts: bool


class ShortConvBackend:
    """The reference. Has the methods of `BaseAttnBackend` that the engine calls."""

    name = "conv"
    graph_safe = True
    prompts_graph_safe = False
    reads_window_only = True
    takes_two_way = True
    short_rows = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def prepare(self, plan: Plan) -> ConvMetadata:
        return ConvMetadata(has_prompts=plan.num_decodes < plan.num_rows)

    def forward(
        self,
        projected: Tensor,
        weight_WD: Tensor,
        bias_D: Tensor | None,
        layer: ConvLayer,
        batch: PoolBatch,
    ) -> Tensor:
        """Store b * x, convolve each channel of it with its taps, and multiply by c. The last tap
        is for the token itself. projected: b, c and x of each token, [T, 3 * D], contiguous.
        Returns [T, D]."""
        b_TD, c_TD, x_TD = projected.chunk(3, dim=-1)
        x_TD = b_TD * x_TD
        layer.inputs[batch.slots.long()] = x_TD  # slot -1 writes the last entry: never read
        metadata: ConvMetadata = batch.attn_metadata
        before: Tensor = metadata.once("before", lambda: self._before(len(weight_WD), layer, batch))
        weight = weight_WD.float()
        sum_TD = x_TD.float() * weight[-1]
        for entries_T, tap_D in zip(before.T, weight[:-1].flip(0), strict=True):
            sum_TD += layer.inputs[entries_T].float() * tap_D
        if bias_D is not None:
            sum_TD += bias_D.float()
        return c_TD * sum_TD.to(x_TD.dtype)

    def _before(self, taps: int, layer: ConvLayer, batch: PoolBatch) -> Tensor:
        """Return the entries of `ConvLayer.inputs` before each token, int64 [T, W - 1], the nearest
        token first."""
        rows, positions = batch.rows, batch.positions.long()
        assert rows is not None
        table_idxs = rows[0]
        if batch.attn_metadata.has_prompts:
            table_idxs = torch.repeat_interleave(rows[0], rows[2], output_size=len(positions))
        before = positions[:, None] - torch.arange(1, taps, device=positions.device)
        index = before.clamp(min=0)
        pages = batch.context.page_table[table_idxs.long()[:, None], index // self.page_size]
        entries = pages.long() * self.page_size + index % self.page_size
        return torch.where(before < 0, len(layer.inputs) - 2, entries)


class CpuShortConvBackend(ShortConvBackend):
    def __init__(self, library: Any, page_size: int) -> None:
        """`library` is what `minisgl.kernel.jit.load_library` returned, or its `Calls`."""
        super().__init__(page_size)
        self._conv = library.short_conv

    def forward(
        self,
        projected: Tensor,
        weight_WD: Tensor,
        bias_D: Tensor | None,
        layer: ConvLayer,
        batch: PoolBatch,
    ) -> Tensor:
        out_TD = torch.empty(len(projected), weight_WD.shape[1], dtype=projected.dtype)
        self._conv(
            projected, weight_WD, bias_D, layer.inputs, batch.slots, batch.context.page_table,
            batch.rows, out_TD, self.page_size, torch.get_num_threads(),
        )  # fmt: skip
        return out_TD


def create_conv_backend(
    name: str, ops: Ops, device: torch.device, page_size: int
) -> ShortConvBackend:
    """Return the backend. name: "torch" for the reference, any other for the fastest on
    `device`."""
    library = library_of(ops) if device.type == "cpu" and name != "torch" else None
    return CpuShortConvBackend(library, page_size) if library else ShortConvBackend(page_size)
