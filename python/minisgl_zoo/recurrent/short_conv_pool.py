"""The pool of short convolutions: the inputs of the last tokens, in the pages of a window group.

A token's convolution reads the inputs of the W - 1 tokens before it, so the page at the end of a
cached prefix has all that the next token needs.

Axes: P pages, Z page size, D channels on this rank, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
