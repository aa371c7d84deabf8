"""Keys and values of all heads as products of one latent vector per token (DeepSeek-V2, 2024).

Head n's key is W_k[n] @ latent, and its value is W_v[n] @ latent. So its score is q @ W_k[n] @
latent, and its output is W_v[n] @ (the weighted sum of latents): attention of all heads to one key,
the latent, which is also the value. Only latents are cached.

Axes: T tokens, N query heads of this rank, K dims of a head's key, V of its value, L of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.layers.base import BaseOP, BuildContext
from minisgl.layers.shard import times
from minisgl.quantization import Part, PlainWeight, Weight, WeightBuild


class LatentHeads(BaseOP):
    """W_k and W_v of this rank's heads. name: of their matrix [heads * (K + V), L]."""

    def __init__(
        self,
        build: BuildContext,
        *,
        heads: range,
        num_heads: int,
        key_size: int,
        value_size: int,
        latent_size: int,
        name: str,
    ) -> None:
        super().__init__()
        rows = key_size + value_size
        part = Part(
            name=name, shape=(num_heads * rows, latent_size), axis=0, share=times(heads, rows)
        )
        format = build.formats.of([part.module], "Linear")
        self.weight = format.weight(WeightBuild(ops=build.ops, dtype=build.dtype, parts=[part]))
        # After the weight, whose buffers must be ready.
        self.plain = Dense(self.weight, part.local_shape)
        self.key_size, self.shape = key_size, (len(heads), rows, latent_size)

    def queries(self, q_TNK: Tensor) -> Tensor:
        """Return q @ W_k, [T, N, L]: queries for latents."""
        keys_NKL = self.plain.tensor.view(self.shape)[:, : self.key_size]
        return torch.bmm(q_TNK.transpose(0, 1), keys_NKL).transpose(0, 1)

    def values(self, sums_TNL: Tensor) -> Tensor:
        """Return the heads' outputs side by side, [T, N * V]. sums: their sums of latents."""
        values_NVL = self.plain.tensor.view(self.shape)[:, self.key_size :]
        # In this order one token takes a third of the other order's time on a CPU.
        out_NVT = torch.bmm(values_NVL, sums_TNL.permute(1, 2, 0))
        return out_NVT.permute(2, 0, 1).flatten(1)


class Dense(BaseOP):
    """A weight as a tensor; a copy if the weight is quantised."""

    tensor: Tensor

    def __init__(self, weight: Weight, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._source = (weight,)  # in a tuple: another node owns it
        self._size = torch.Size(shape).numel() * weight.dtype.itemsize

    def init_buffers(self, device: torch.device) -> None:
        self.tensor = self._source[0].dense()

    @property
    def num_buffer_bytes(self) -> int:
        return 0 if isinstance(self._source[0], PlainWeight) else self._size
