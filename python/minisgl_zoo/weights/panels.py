"""Quantised weights in panels, the layout of `csrc/numbers.h`, for GEMMs on a CPU.

Packing permutes a weight's bytes in place, some panels at a time.

Axes: O outputs, I inputs, G groups of inputs, P panels of 16 outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from minisgl.kernel.cpu import GATES, PANEL, CpuOps
from minisgl.kernel.ops import Activation

Kind = Literal["int8", "int4", "fp4", "fp8", "int6"]
KINDS: Final[tuple[Kind, ...]] = ("int8", "int4", "fp4", "fp8", "int6")
"""The index is the number of the kind in `csrc/numbers.cpp`."""
PIECE_BYTES = 1 << 18  # of fp8, packed at a time; the intermediate tensors take as many
MOST = 128  # the most inputs of a block of integers, see csrc/numbers.cpp


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """A matrix, or several of equal shape one after another: value = (number - zero) * scale.

    numbers: packed. group: inputs of a group. scales: float; for fp4 exponents + 127 as uint8; one
    for each group, or with factors one for several groups. factors: int8, one for each group, which
    multiply the scales. zeros: uint8, one for each group; `middle` stands for no offset. steps: of
    the shape of scales; with them the value is (number + middle) * scale - zero * step, and absent
    zeros are ones. All tensors are packed by `pack_rows`. outputs, inputs: of one matrix.
    """

    kind: Kind
    numbers: Tensor
    group: int
    scales: Tensor
    zeros: Tensor | None
    middle: int
    outputs: int
    inputs: int
    factors: Tensor | None = None
    steps: Tensor | None = None

    def __getitem__(self, index: int) -> Panels:
        """Return matrix `index`."""
        count = self.numbers.numel() // _row_bytes(self) // self.outputs

        def matrix(tensor: Tensor) -> Tensor:
            return tensor.view(count, -1)[index]

        def optional(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else matrix(tensor)

        return replace(
            self, numbers=matrix(self.numbers), scales=matrix(self.scales),
            factors=optional(self.factors), zeros=optional(self.zeros), steps=optional(self.steps),
        )  # fmt: skip

    def linear(
        self, ops: CpuOps, x: Tensor, bias: Tensor | None, gate: Activation | None
    ) -> Tensor:
        """See `Ops.linear`."""
        fused = gate if self.outputs % (2 * PANEL) == 0 else None
        rows = x if x.dim() == 2 else x.reshape(-1, self.inputs)
        width = self.outputs // (2 if fused else 1)
        out = torch.empty(rows.shape[0], width, dtype=x.dtype)
        self.linear_into(ops, rows.contiguous(), bias, fused, out)
        y = out if rows is x else out.view(*x.shape[:-1], width)
        return ops.gated(y, gate) if gate and not fused else y

    def logits(self, ops: CpuOps, x_SD: Tensor) -> Tensor:
        """See `Ops.logits`."""
        out_SV = torch.empty(x_SD.shape[0], self.outputs, dtype=torch.float32)
        self.linear_into(ops, x_SD.contiguous(), None, None, out_SV)
        return out_SV

    def linear_into(
        self, ops: CpuOps, rows: Tensor, bias: Tensor | None, gate: Activation | None, out: Tensor
    ) -> None:
        """Do `linear` for rows [M, I], which are contiguous, and write to `out`, whose rows may
        have gaps between them. gate: only if the outputs are pairs of whole panels. out: of the
        dtype of the rows; without a gate it may be float32."""
        ops.calls.numbers_linear(
            rows, *self.tensors, bias, GATES[gate], out, torch.get_num_threads()
        )

    def rows(self, ops: CpuOps, ids_T: Tensor) -> Tensor:
        """Return rows of a matrix of integers, in bfloat16."""
        out_TD = torch.empty(len(ids_T), self.inputs, dtype=torch.bfloat16)
        num_threads = torch.get_num_threads()
        ops.calls.numbers_rows(ids_T, *self.tensors, self.outputs, out_TD, num_threads)
        return out_TD

    @property
    def tensors(self) -> tuple[Tensor | int | None, ...]:
        """The arguments that the C++ functions take."""
        return (
            self.numbers, KINDS.index(self.kind), self.group, self.scales, self.factors,
            self.zeros, self.steps, self.middle,
        )  # fmt: skip


def takes(outputs: int, inputs: int, group: int, dtype: torch.dtype, kind: Kind) -> bool:
    """Return whether the kernels multiply such matrices by inputs of `dtype`. group: 0 means all
    inputs."""
    if dtype != torch.bfloat16 or outputs % PANEL or inputs % 8 or group % 8:
        return False
    return kind == "fp8" or group <= MOST or group % MOST == 0


def _row_bytes(panels: Panels) -> int:
    bits = {"int4": 4, "fp4": 4, "int6": 6}.get(panels.kind, 8)
    return panels.inputs * bits // 8


def pack_rows(ops: CpuOps, values: Tensor) -> None:
    """Pack scales or zeros in place: [..., O, G] -> [..., P, G, 16]."""
    ops.calls.pack_entries(values, torch.get_num_threads())


def unpack_rows(values: Tensor) -> Tensor:
    """Undo `pack_rows`, in new memory."""
    columns = values.shape[-1]
    return values.view(-1, columns, PANEL).transpose(1, 2).reshape(values.shape)


def pack_bytes(ops: CpuOps, numbers: Tensor, kind: Kind) -> None:
    """Pack int8 or fp8 numbers [..., O, I], or int6 ones [..., O, I / 4 * 3], in place."""
    if kind in ("int8", "int6"):
        entry = torch.int16 if kind == "int8" else torch.int32
        ops.calls.pack_entries(numbers.view(entry), torch.get_num_threads())
        return
    for bytes_ in _pieces(numbers.view(torch.uint8)):
        outputs, inputs = bytes_.shape
        quads = bytes_.view(outputs // PANEL, 4, 4, inputs // 4, 2, 2)
        bytes_.copy_(quads.permute(0, 3, 1, 4, 2, 5).reshape(outputs, inputs))


def _pieces(bytes_: Tensor) -> tuple[Tensor, ...]:
    """Split [..., O, bytes] into views of whole panels, [some O, bytes], of about `PIECE_BYTES`."""
    rows = bytes_.flatten(0, -2)
    return torch.split(rows, max(PIECE_BYTES // (rows.shape[1] * PANEL), 1) * PANEL)


def unpack_bytes(numbers: Tensor, kind: Kind) -> Tensor:
    """Undo `pack_bytes`, in new memory."""
    if kind == "int6":
        return unpack_rows(numbers.view(torch.int32)).view(numbers.dtype)
    bytes_ = numbers.view(torch.uint8).flatten(0, -2)
    outputs, inputs = bytes_.shape
    panels = bytes_.view(outputs // PANEL, inputs // 2, PANEL, 2).transpose(1, 2)
    if kind == "fp8":
        quads = bytes_.view(outputs // PANEL, inputs // 4, 4, 2, 4, 2)
        panels = quads.permute(0, 2, 4, 1, 3, 5)
    return panels.reshape(numbers.shape).view(numbers.dtype)


def six_bits(rows: Tensor) -> Tensor:
    """Return the numbers [..., I], int8, of int6 ones, uint8 [..., I / 4 * 3] (numbers.h)."""
    words = rows.reshape(*rows.shape[:-1], -1, 3, 4)
    upper = words >> 6
    fourth = upper[..., 0, :] | upper[..., 1, :] << 2 | upper[..., 2, :] << 4
    placed = torch.cat((words & 63, fourth.unsqueeze(-2)), -2)  # [..., 2 * 2 places, 2 * 2 bytes]
    pairs = placed.view(*placed.shape[:-2], 2, 2, 2, 2)  # inputs: 8, 2, 1, 4 times
    return pairs.transpose(-1, -2).transpose(-2, -3).flatten(-4).flatten(-2).view(torch.int8) - 32


def pack_nibbles(ops: CpuOps, packed: Tensor, *, offset: int) -> None:
    """Pack 4-bit numbers in place: uint8 [..., O, I / 2], the number of the even column in the low
    bits. offset: with 8, numbers from 0 to 15 become the two's complement of -8 to 7.
    """
    ops.calls.pack_nibbles(packed, offset, torch.get_num_threads())


def unpack_nibbles(packed: Tensor, *, offset: int) -> Tensor:
    """Undo `pack_nibbles`, in new memory."""
    half = packed.shape[-1]
    words = packed.view(-1, half // 4, PANEL, 4).transpose(1, 2).reshape(-1, half // 4, 2, 2)
    low, high = words & 15, words >> 4
    numbers = torch.stack((low, high), -1).flatten(-2)  # [O, I / 8, even or odd, 4]
    even, odd = numbers.unbind(-2)
    return ((even | odd << 4) ^ (offset * 17)).reshape(packed.shape)
