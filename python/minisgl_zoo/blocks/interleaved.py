"""Reorders the outputs of q and k for heads that rotate the pairs (2i, 2i + 1).

Our layers rotate the pairs (i, i + R/2), R being the number of rotated dims. Both projections are
reordered in the same way, so q @ k does not change. In a quantised checkpoint scales and zero
points are reordered, too::

    an entry for each output         weight, bias, scales of rows and groups     reordered
    a row of entries for each head   weights of norms on heads                   reordered
    an entry for whole heads         scales of blocks                            as they are
    32-bit words of several outputs  zero points; all numbers of AWQ             unpacked, reordered
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.errors import ConfigError
from minisgl.models.view import OUTPUTS, fused
from minisgl_zoo.weights.grouped import AWQ_ORDER

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.view import CheckpointView


def deinterleave(rows: Tensor, *, head_dim: int, rotary_dim: int) -> Tensor:
    """Return the rows of q or k, or of their bias, reordered within each head."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    rotary = heads[:, :rotary_dim]
    return torch.cat((rotary[:, 0::2], rotary[:, 1::2], heads[:, rotary_dim:]), 1).flatten(0, 1)


class Heads:
    """The heads of the model's q and k projections."""

    def __init__(self, config: ModelConfig) -> None:
        self.head_dim, self.rotary_dim = config.head_dim, config.rope.rotary_dim
        self._outputs = {
            ".q_proj": config.num_heads * config.head_dim,
            ".k_proj": config.num_kv_heads * config.head_dim,
        }

    def reordered(self, name: str, tensor: Tensor, view: CheckpointView) -> Tensor:
        """Return the reordered tensor, or the tensor itself if it is not part of q or k.

        tensor: a whole tensor of the checkpoint, or a rank's share of whole heads. Raises
        ConfigError if an entry is for several outputs that would be separated.
        """
        module, _, suffix = name.rpartition(".")
        if module.endswith((".q_norm", ".k_norm")) and tensor.dim() == 2:
            return self._by_heads(tensor.flatten()).view(tensor.shape)
        outputs = self._outputs.get(module[-len(".q_proj") :])
        axis = OUTPUTS.get(suffix)
        if outputs is None or axis is None or tensor.numel() == 1:
            return tensor
        entries = view.shape(name)[axis]
        each = 1 << (-(-outputs // entries) - 1).bit_length()  # the last entry may be for fewer
        if each == 1:
            return self._by_heads(tensor.movedim(axis, 0)).movedim(0, axis).contiguous()
        if each % self.head_dim == 0:
            return tensor
        if tensor.dtype != torch.int32 or each not in (4, 8):
            raise ConfigError(
                f"{view.folder}: {name} {list(tensor.shape)} has one entry for {each} outputs, "
                f"which must be reordered in each head of {self.head_dim}; expected an entry for "
                "each output or for whole heads; use the unquantised checkpoint, with "
                "--quantization if need be"
            )
        numbers = f"{module}.qweight"
        is_awq = numbers in view.names and view.shape(numbers)[1] != outputs
        places = torch.tensor(AWQ_ORDER if is_awq else range(each), device=tensor.device)
        shifts = places[:, None] * (32 // each)
        columns = (
            tensor.movedim(axis, 0).flatten(1)[:, None].long() >> shifts & (1 << 32 // each) - 1
        )
        columns = self._by_heads(columns.flatten(0, 1)).view(columns.shape)
        words = (columns << shifts).sum(1)
        words -= words >> 31 << 32  # as int32
        return (
            words.to(torch.int32).view(tensor.movedim(axis, 0).shape).movedim(0, axis).contiguous()
        )

    def _by_heads(self, rows: Tensor) -> Tensor:
        return deinterleave(rows, head_dim=self.head_dim, rotary_dim=self.rotary_dim)


def interleaved_heads(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Reorder the rows of q and k for heads that rotate the pairs (2i, 2i + 1)."""
    return view.reordered(Heads(config).reordered)


def interleaved(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """`fused`, for heads that rotate interleaved pairs."""
    return interleaved_heads(fused(view, config), config)
