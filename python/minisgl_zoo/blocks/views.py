"""Views of a checkpoint whose tensors have another form than the layers declare.

`Heads` reorders the outputs of q and k for heads that rotate the pairs (2i, 2i + 1). Our layers
rotate the pairs (i, i + R/2), R being the number of rotated dims. Both projections are reordered in
the same way, so q @ k does not change. In a quantised checkpoint scales and zero points are
reordered, too::

    an entry for each output         weight, bias, scales of rows and groups     reordered
    a row of entries for each head   weights of norms on heads                   reordered
    an entry for whole heads         scales of blocks                            as they are
    32-bit words of several outputs  zero points; all numbers of AWQ             unpacked, reordered

`StackedExperts` shows stacked experts as gate then up, [E, 2F, D], and down, [E, D, F]. In
gpt-oss's files the rows of gate and up alternate; so do their biases and MXFP4's blocks and scales.
Tensors that are not quantised have inputs before outputs, also in Qwen3-VL's files::

    in the files    gate_up_proj [E, D, 2F]     gate_up_proj_blocks [E, 2F, D / 32, 16]
                    down_proj    [E, F, D]      down_proj_blocks    [E, D, F / 32, 16]

`ScaledView` multiplies tensors by a family's constants, which then cost nothing when the model
runs. A quantised weight's value is (number - zero) * scale, so its scales are multiplied. All
outputs that one scale is for must have the same factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from minisgl.errors import ConfigError
from minisgl.models.config import ModelConfig
from minisgl.models.loading.weight import DTYPES
from minisgl.quantization import Part
from minisgl_zoo.view import OUTPUTS, CheckpointView, fused
from minisgl_zoo.weights.grouped import AWQ_ORDER
from minisgl_zoo.wrapper import text_name


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


TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")


class StackedExperts(CheckpointView):
    alternates = True

    @classmethod
    def of(cls, view: CheckpointView, config: ModelConfig) -> StackedExperts:
        return cls(view.folder, text_name, view.files)

    def is_transposed(self, name: str) -> bool:
        return name.endswith(TRANSPOSED)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (shape[0], shape[2], shape[1]) if self.is_transposed(name) else shape

    def share(self, name: str, part: Part) -> Tensor:
        if part.stack is None or name != part.stack.name:
            return super().share(name, part)
        index = [slice(0, size) for size in part.shape]
        index[part.axis] = slice(part.share.start, part.share.stop)
        first, rows, alternate = part.stack.first, index[0], slice(None)
        if not self.alternates:
            index[0] = slice(first + rows.start, first + rows.stop)
        elif ".gate_up_proj" in name:
            index[0] = slice(2 * rows.start, 2 * rows.stop)
            alternate = slice(int(first > 0), None, 2)
        is_transposed = self.is_transposed(name)
        places = index[::-1] if is_transposed else index
        file_name, _ = self._places[name]
        file = self.files[file_name]
        tensor: Tensor = file.get_slice(file_name)[(part.stack.index, *places)]
        return (tensor.mT if is_transposed else tensor)[alternate]


class TransposedExperts(StackedExperts):
    """Gate and up one after another. As in transformers 5, which also writes such files without the
    transposition, a tensor is transposed if its last axis is not that of the inputs."""

    alternates = False
    num_inputs: dict[str, int]

    @classmethod
    def of(cls, view: CheckpointView, config: ModelConfig) -> TransposedExperts:
        made = cls(view.folder, text_name, view.files)
        sizes = config.hidden_size, config.fields.integer("moe_intermediate_size")
        made.num_inputs = dict(zip(TRANSPOSED, sizes, strict=True))
        return made

    def is_transposed(self, name: str) -> bool:
        if not super().is_transposed(name):
            return False
        module = f".experts.{name.rpartition('.')[2]}"
        return CheckpointView.shape(self, name)[-1] != self.num_inputs[module]


SCALES: Final = ("weight_scale", "weight_scale_inv", "scales")


class ScaledView(CheckpointView):
    """Products are float32. Those of plain tensors are rounded once, to the file's dtype."""

    def __init__(
        self, view: CheckpointView, factors: Mapping[str, float], rows: Mapping[str, Tensor]
    ) -> None:
        """factors: the end of a declared name -> the number that multiplies the tensor. rows: the
        end of a declared name -> the numbers that multiply the tensor's rows. A name ends in
        .weight or .bias."""
        super().__init__(view.folder, text_name, view.files)
        self._factors, self._rows = factors, rows

    def share(self, name: str, part: Part) -> Tensor:
        """Raises ConfigError if one scale is for outputs with different factors, or if the scales
        are numbers of 8 bits."""
        tensor = super().share(name, part)
        module, _, suffix = name.rpartition(".")
        is_scale = suffix in SCALES
        kind = self.dtype(name)
        if not is_scale and kind not in DTYPES:
            return tensor  # quantised numbers, or zero points
        own = f"{module}.weight" if is_scale else name
        factor: float | Tensor = 1.0
        for end, number in self._factors.items():
            factor = number if own.endswith(end) else factor
        for end, numbers in self._rows.items():
            if own.endswith(end):
                axis = OUTPUTS[suffix]
                along = self._entries(numbers, name, axis if is_scale else 0)
                share = part.share if part.axis == axis else range(len(along))
                factor = along[share.start : share.stop].to(tensor.device)
                factor = factor.view(*[1] * axis, -1, *[1] * (tensor.dim() - axis - 1))
        if isinstance(factor, float) and factor == 1.0:
            return tensor
        if kind not in DTYPES:
            raise ConfigError(
                f"{self.folder}: {name} is {kind}, which cannot be multiplied by this family's "
                "constants; use the unquantised checkpoint, with --quantization if need be"
            )
        product = tensor.to(torch.float32) * factor
        return product if is_scale else product.to(tensor.dtype)

    def _entries(self, numbers: Tensor, name: str, axis: int) -> Tensor:
        """Return the factor of each entry along the axis of outputs. numbers: each output's
        factor."""
        shape = self.shape(name)
        count = shape[axis] if len(shape) > axis else 1
        each = 1 << (-(-len(numbers) // count) - 1).bit_length() if count > 1 else len(numbers)
        groups = torch.split(numbers, each)
        if len(groups) != count or any(bool((group != group[0]).any()) for group in groups):
            raise ConfigError(
                f"{self.folder}: {name} {list(shape)} has one entry for {each} outputs, which this "
                "family multiplies by different constants; expected a scale for each output, or a "
                "plain tensor; use the unquantised checkpoint, with --quantization if need be"
            )
        return torch.stack([group[0] for group in groups])
