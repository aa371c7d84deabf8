"""What blocks of llama.cpp's formats become on a GPU: tiles, in the order of matrix instructions.

value = number * scale * factor - step * zero, as in `minisgl_zoo.gguf.blocks`; but numbers keep the
bits that they have in the file. Nothing is rounded.

A tile has 16 outputs and 64 inputs, 32 lanes of a warp with 32 numbers each. Lane 4g + t has those
of outputs g and g + 8 (the two rows r) and inputs 16j + 4t + i, for j and i below 4. Their bits are
split into planes of 8, 4, 2 or 1 bits, each a word or some words of a lane; `_place` says where a
number's bits are in a word. Numbers i and i + 1 are 16 bits apart, so that one instruction takes
both out as a pair.

Axes: O outputs, I inputs, N blocks of a row, B bytes of a block; T tiles of 16 outputs, S steps of
64 inputs. Of products: M rows, F outputs, D inputs, T tokens, K experts of each, L experts here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from minisgl.kernel.ops import Activation, Ops
from minisgl_zoo.gguf.header import TYPE_OF

OUTPUTS, INPUTS = 16, 64
"""Of a tile: what one load of 16 bytes a lane brings of 4-bit numbers."""
PIECE_NUMBERS: Final = 1 << 24
"""The numbers that are packed at a time: temporary tensors take some 12 bytes for each."""


@dataclass(frozen=True, slots=True)
class TileForm:
    """bits: of a number. group: inputs with one factor and zero. block: inputs with one scale and
    step. has_step: else all zeros are `middle`. is_table: a number is an index of llama.cpp's table
    of 16 values (IQ4)."""

    bits: int
    group: int
    block: int
    has_step: bool = False
    middle: int = 0
    is_table: bool = False

    @property
    def planes(self) -> tuple[int, ...]:
        """The bits of each plane. The first has the lowest bits of a number."""
        return {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}[self.bits]

    @property
    def unit(self) -> int:
        """Inputs of a matrix are a multiple of this."""
        return max(self.block, INPUTS)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix."""
        return round(outputs * inputs * self.bits_in_memory / 8)

    @property
    def factor_bytes(self) -> int:
        """Bytes of a row's factors and zeros in a tile; Q2_K has a byte for both."""
        if self.block != 256:
            return 0
        both = self.has_step and self.group == 32
        return INPUTS // self.group * (2 if both else 1)

    @property
    def num_halves(self) -> int:
        """Scales and steps of a row: in a tile, or in a block of 256."""
        return (2 if self.has_step else 1) * (1 if self.block == 256 else INPUTS // self.block)

    @property
    def bits_in_memory(self) -> float:
        """Bits of memory for each weight, scales included."""
        span = 256 if self.block == 256 else INPUTS
        return self.bits + 8 * self.factor_bytes / INPUTS + 16 * self.num_halves / span


TILE_FORMS: Final[Mapping[str, TileForm]] = {
    "Q4_0": TileForm(4, 32, 32, middle=8),
    "Q4_1": TileForm(4, 32, 32, has_step=True),
    "Q5_0": TileForm(5, 32, 32, middle=16),
    "Q5_1": TileForm(5, 32, 32, has_step=True),
    "Q8_0": TileForm(8, 32, 32),
    "Q2_K": TileForm(2, 16, 256, has_step=True),
    "Q3_K": TileForm(3, 16, 256, middle=4),
    "Q4_K": TileForm(4, 32, 256, has_step=True),
    "Q5_K": TileForm(5, 32, 256, has_step=True),
    "Q6_K": TileForm(6, 16, 256, middle=32),
    "IQ4_NL": TileForm(4, 32, 32, is_table=True),
    "IQ4_XS": TileForm(4, 32, 256, is_table=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A matrix. numbers: uint8 [T, S, bytes of a tile]. factors: uint8 [T, S, g, r, bytes], which
    are factors + 128, then zeros; none where a block is one group. scales: float16 [T, S, or blocks
    of 256, g, r, scales, then steps]."""

    form: TileForm
    numbers: Tensor
    factors: Tensor
    scales: Tensor
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a token and one of its experts.

    ids_TK: int32, their experts. held: those of this rank. counts_L, rows_LT: int32, how many pairs
    each expert has, and which. Without them pairs are not grouped by expert.
    """

    ids_TK: Tensor
    held: range
    counts_L: Tensor | None = None
    rows_LT: Tensor | None = None

    def most_parts(self, size: int) -> int:
        """The most parts of up to `size` pairs of one expert, or of one pair."""
        num_tokens, num_pairs = len(self.ids_TK), self.ids_TK.numel()
        if self.counts_L is None:
            return num_pairs
        busy = min(len(self.held), num_pairs)  # experts; the last part of each may be short
        return min(num_pairs // size + busy, busy * -(-num_tokens // size))


class TileProducts(Protocol):
    """The products by one matrix: the row "tiles" of the table `ops`."""

    def __init__(self, ops: Ops, tiles: Tiles) -> None: ...

    @staticmethod
    def why_not(dtype: torch.dtype) -> str | None:
        """Return why the device cannot multiply by activations of `dtype`, or None if it can."""

    def dense(self) -> Tensor:
        """Return the values in bfloat16."""

    def dense_rows(self, rows: range) -> Tensor:
        """Return the values of some outputs, whose bounds are multiples of `OUTPUTS`."""

    def rows(self, ids_T: Tensor) -> Tensor:
        """See `Ops.embed`."""

    def linear(self, x_MD: Tensor, bias: Tensor | None, gate: Activation | None) -> Tensor:
        """See `Ops.linear`."""

    def linear_into(self, x_MD: Tensor, bias: Tensor | None, out_MF: Tensor) -> None:
        """Do `linear` and write to `out`, whose rows may have gaps between them."""

    def logits(self, x_SD: Tensor) -> Tensor:
        """See `Ops.logits`."""

    def experts(
        self, x: Tensor, pairs: Pairs, scales: Tensor | None, out: Tensor, gate: Activation | None
    ) -> bool:
        """Write the product of each pair by its expert's matrix, gated and times its scale, to a
        row of out [T * K, F]. The matrices of all experts are one below the other. Rows of other
        ranks' pairs are not written. Returns whether there is a kernel.

        x has a row for each pair, or for each token.
        """


@dataclass(frozen=True, slots=True)
class _Read:
    """What some rows of blocks say. numbers: uint8 [O, I]. scale, step: float16 [O, N]. factor,
    zero: integers [O, I / group]."""

    numbers: Tensor
    scale: Tensor
    factor: Tensor | None = None
    step: Tensor | None = None
    zero: Tensor | None = None


def pack_tiles(kind: str, rows_OB: Tensor) -> Tiles:
    """Return the tiles of rows of blocks, uint8 [O, bytes]; O is a multiple of 16. kind:
    llama.cpp's name of the format."""
    form, num_outputs = TILE_FORMS[kind], len(rows_OB)
    size = TYPE_OF[kind].num_bytes
    num_inputs = rows_OB.shape[1] // size * form.block
    steps, blocks = num_inputs // INPUTS, num_inputs // max(form.block, INPUTS)
    tiles = num_outputs // OUTPUTS
    made = Tiles(
        form=form,
        numbers=rows_OB.new_empty((tiles, steps, OUTPUTS * INPUTS * form.bits // 8)),
        factors=rows_OB.new_empty((tiles, steps, 8, 2, form.factor_bytes)),
        scales=rows_OB.new_empty((tiles, blocks, 8, 2, form.num_halves), dtype=torch.float16),
        outputs=num_outputs,
        inputs=num_inputs,
    )
    each = max(PIECE_NUMBERS // num_inputs // OUTPUTS, 1)
    for first in range(0, tiles, each):
        piece = slice(first, min(first + each, tiles))
        rows = rows_OB[piece.start * OUTPUTS : piece.stop * OUTPUTS]
        read = _READERS[kind](_split(rows, size))
        made.numbers[piece] = _packed_numbers(form, read.numbers)
        if form.factor_bytes:
            made.factors[piece] = _packed_factors(form, read)
        made.scales[piece] = _packed_scales(form, read)
    return made


def _place(form: TileForm, plane: int, number: int, row: int) -> int:
    """The first bit of number 4j + i in its word of a plane of so many bits."""
    j, i = divmod(number, 4)
    pair, second = 2 * j + i // 2, i % 2
    byte = i // 2 + 2 * second
    if plane == 8:
        return 8 * byte
    if form.is_table:
        return 16 * (j % 2) + 4 * byte
    if plane == 4:
        return 4 * (pair % 4) + 16 * second
    return plane * pair + 16 * second + (8 * row if plane == 1 else 0)


def _packed_numbers(form: TileForm, numbers_OI: Tensor) -> Tensor:
    """[O, I] -> [T, S, bytes]."""
    steps = numbers_OI.shape[1] // INPUTS
    # [T, r, g, S, j, t, i] -> [T, S, g, t, r, j, i]
    lanes = numbers_OI.view(-1, 2, 8, steps, 4, 4, 4).permute(0, 3, 2, 5, 1, 4, 6).int()
    planes: list[Tensor] = []
    done = 0
    for plane in form.planes:
        places = [[_place(form, plane, number, r) for number in range(16)] for r in range(2)]
        at = torch.tensor(places, dtype=torch.int32, device=lanes.device).view(2, 4, 4)
        bits = (lanes >> done & (1 << plane) - 1) << at
        done += plane
        if plane == 1:
            words = bits.sum((-3, -2, -1), dtype=torch.int32)
        elif plane == 2:
            words = bits.sum((-2, -1), dtype=torch.int32)
        else:  # a row has words for all j, or one for each two
            words = bits.view(*bits.shape[:-2], plane // 2, -1, 4).sum((-2, -1), dtype=torch.int32)
            words = words.transpose(-1, -2)
        if plane == 8:  # two loads of 16 bytes: all lanes' first halves come first
            words = words.reshape(*words.shape[:-2], 2, 2, 2).permute(0, 1, 4, 2, 3, 5, 6)
        planes.append(words.contiguous().view(torch.uint8).flatten(2))
    return torch.cat(planes, -1)


def _packed_factors(form: TileForm, read: _Read) -> Tensor:
    """[T, S, g, r, bytes]."""
    assert read.factor is not None
    parts = [read.factor if form.bits == 2 else read.factor + 128]
    if read.zero is not None:
        parts = [parts[0] | read.zero << 4] if form.bits == 2 else [*parts, read.zero]
    return torch.cat([_by_rows(part, INPUTS // form.group) for part in parts], -1).to(torch.uint8)


def _packed_scales(form: TileForm, read: _Read) -> Tensor:
    """[T, S or blocks of 256, g, r, scales and steps]."""
    each = 1 if form.block == 256 else INPUTS // form.block
    parts = [read.scale] if read.step is None else [read.scale, read.step]
    return torch.cat([_by_rows(part, each) for part in parts], -1)


def _by_rows(entries: Tensor, each: int) -> Tensor:
    """[O, steps * each] -> [T, steps, g, r, each]."""
    return entries.view(-1, 2, 8, entries.shape[1] // each, each).permute(0, 3, 2, 1, 4)


def _split(bytes_: Tensor, size: int) -> Tensor:
    """Split the last axis into parts of so many bytes."""
    return bytes_.reshape(*bytes_.shape[:-1], -1, size)


def _half(blocks_ONB: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, [O, N]."""
    return blocks_ONB[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _bits(bytes_: Tensor, count: int, width: int) -> Tensor:
    """Parts of `width` bits of [..., n] bytes, the lowest first: [..., count, n]."""
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8, device=bytes_.device)
    return bytes_[..., None, :] >> shifts[:, None] & (1 << width) - 1


def _nibbles(bytes_: Tensor, run: int) -> Tensor:
    """Numbers of 4 bits, in each run of bytes the low halves first: [O, N, n] -> [O, N, 2n]."""
    return _bits(_split(bytes_, run), 2, 4).flatten(2)


def _fifth(bytes_: Tensor) -> Tensor:
    """The bits of 4 bytes, times 16: [O, N, 32]."""
    return _bits(bytes_[..., None], 8, 1).flatten(2) << 4


def _of_32(first: int, numbers: Callable[[Tensor], Tensor]) -> Callable[[Tensor], _Read]:
    """The reader of a format with blocks of 32. first: the bytes of its scale and minimum."""

    def read(b: Tensor) -> _Read:
        step = -_half(b, 2) if first == 4 else None
        return _Read(numbers(b).flatten(1), _half(b, 0), step=step)

    return read


def _six_bits(b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors and zeros of Q4_K and Q5_K, [O, N * 8]."""
    first, second, third = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    factor = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    zero = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return factor.flatten(1).int(), zero.flatten(1).int()


def _q2_k(b: Tensor) -> _Read:
    numbers = _bits(_split(b[..., 16:80], 32), 4, 2).flatten(1)
    entries = b[..., :16].flatten(1).int()
    return _Read(numbers, _half(b, 80), entries & 15, _half(b, 82), entries >> 4)


def _q3_k(b: Tensor) -> _Read:
    low = _bits(_split(b[..., 32:96], 32), 4, 2).flatten(2)
    numbers = low | _bits(b[..., :32], 8, 1).flatten(2) << 2
    factor = _bits(b[..., 96:104], 2, 4).flatten(2) | _bits(b[..., 104:108], 4, 2).flatten(2) << 4
    return _Read(numbers.flatten(1), _half(b, 108), factor.flatten(1).int() - 32)


def _q4_k(b: Tensor) -> _Read:
    factor, zero = _six_bits(b)
    return _Read(_nibbles(b[..., 16:], 32).flatten(1), _half(b, 0), factor, _half(b, 2), zero)


def _q5_k(b: Tensor) -> _Read:
    factor, zero = _six_bits(b)
    numbers = _nibbles(b[..., 48:], 32) | _bits(b[..., 16:48], 8, 1).flatten(2) << 4
    return _Read(numbers.flatten(1), _half(b, 0), factor, _half(b, 2), zero)


def _q6_k(b: Tensor) -> _Read:
    high = _bits(_split(b[..., 128:192], 32), 4, 2).flatten(2)
    numbers = _nibbles(b[..., :128], 64) | high << 4
    factor = b[..., 192:208].contiguous().view(torch.int8)
    return _Read(numbers.flatten(1), _half(b, 208), factor.flatten(1).int())


def _iq4_xs(b: Tensor) -> _Read:
    low = _bits(b[..., 4:8, None], 2, 4).flatten(2)
    factor = low | _bits(b[..., 2:4, None], 4, 2).flatten(2) << 4
    return _Read(
        _nibbles(b[..., 8:], 16).flatten(1), _half(b, 0), factor.flatten(1).int() - 32
    )  # fmt: skip


_READERS: Final[Mapping[str, Callable[[Tensor], _Read]]] = {
    "Q4_0": _of_32(2, lambda b: _nibbles(b[..., 2:], 16)),
    "Q4_1": _of_32(4, lambda b: _nibbles(b[..., 4:], 16)),
    "Q5_0": _of_32(2, lambda b: _nibbles(b[..., 6:], 16) | _fifth(b[..., 2:6])),
    "Q5_1": _of_32(4, lambda b: _nibbles(b[..., 8:], 16) | _fifth(b[..., 4:8])),
    "Q8_0": _of_32(2, lambda b: b[..., 2:]),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _of_32(2, lambda b: _nibbles(b[..., 2:], 16)),
    "IQ4_XS": _iq4_xs,
}
