"""The pools of recurrent layers: states at multiples of an interval, and rows of the tokens since.

The tensors of `minisgl_zoo.recurrent.delta_rule`. State pages and rows belong to two cache groups.
Neither is initialised: a step writes before a later one reads.

A token's convolution reads the inputs of the W - 1 tokens before it, so a page of the rows group
keeps only the last inputs, in a ring: the token at index i of page p has entry p * R + i % R. A
row of a step writes the inputs of its last W - 1 tokens. W - 1 + F consecutive tokens have
different entries, so F tokens that are taken back, or computed again, overwrite no input that the
next token needs.

Axes: P state pages, L pages of the rows group, S its slots, R entries of a ring, N local value
heads, K local key heads, H key dim, V value dim, D = 2 K H + N V inputs of the convolution, W its
taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """The sizes of one layer on one rank. dtype: that of the activations. most_false: the most
    tokens that one step computes and the next one takes back."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    most_false: int = 1
    dtype: torch.dtype

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.num_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """The bytes of a state page in one layer."""
        matrix = 4 * self.num_heads * self.key_dim * self.value_dim
        return matrix + (self.taps - 1) * self.conv_width * self.dtype.itemsize

    def ring(self, page_size: int) -> int:
        """Inputs of the convolution that a page keeps."""
        return min(page_size, self.taps - 1 + self.most_false)

    def page_bytes(self, page_size: int) -> int:
        """The bytes of a page of rows in one layer."""
        row = 4 * self.num_heads * (self.value_dim + 1) + self.key_width * self.dtype.itemsize
        return page_size * row + self.ring(page_size) * self.conv_width * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayer:
    """One layer's cache.

    states: float32 [P, N, H, V]. tails: [P, W - 1, D], the last inputs of the convolution before
    the page's position. inputs: [L * R, D], keys: [S, K, H], updates: float32 [S, N, V], decays:
    float32 [S, N]; see `minisgl_zoo.recurrent.delta_rule.Rows`.
    """

    states: Tensor
    tails: Tensor
    inputs: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor


class RecurrentPool:
    """ring: R."""

    def __init__(
        self,
        shape: RecurrentShape,
        *,
        num_layers: int,
        num_states: int,
        num_row_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        def create(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
            return torch.empty(num_layers, *sizes, dtype=dtype, device=device)

        self.ring = shape.ring(page_size)
        num_slots = num_row_pages * page_size
        heads, key_dim, value_dim = shape.num_heads, shape.key_dim, shape.value_dim
        tensors = {
            "states": create(num_states, heads, key_dim, value_dim, dtype=torch.float32),
            "tails": create(num_states, shape.taps - 1, shape.conv_width),
            "inputs": create(num_row_pages * self.ring, shape.conv_width),
            "keys": create(num_slots, shape.num_key_heads, key_dim),
            "updates": create(num_slots, heads, value_dim, dtype=torch.float32),
            "decays": create(num_slots, heads, dtype=torch.float32),
        }
        self._layers = [
            RecurrentLayer(**{name: tensor[index] for name, tensor in tensors.items()})
            for index in range(num_layers)
        ]

    def layer(self, layer_id: int) -> RecurrentLayer:
        """Return the cache of one layer. The tensors never change."""
        return self._layers[layer_id]
