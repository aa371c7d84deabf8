"""Products of LoRA adapters for few tokens: two launches for a linear layer, whatever the slots.

The A's of all slots are one matrix, and so are the B's; a mask keeps what belongs to a token. The
first kernel splits the inputs among programs, and the last one that ends adds up what all have. The
second adds to the layer's outputs. Both load adapters before they wait for the kernel before.

Axes: T tokens, N slots, P names, R rank, S splits, I inputs, O outputs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl_zoo.lora.products import MIN_RANK, Products

MAX_TOKENS = 256
"""More have torch's GEMMs, whose masks and copies are then a small part. 64 were timed."""
ROWS = 64  # tokens of a program, at most
INPUTS = 256  # of a program, at a time
COLUMNS = 32  # of the A's, in a program
OUTPUTS = 64  # of a program
RANKS = 128  # rows of the B's, in a program, at a time
MAX_SPLITS = 32
PROGRAMS = 132
"""The first kernel has at least so many if the inputs can be split so often."""


class AdapterProducts:
    """Implements `minisgl_zoo.lora.products.FewTokens`.

    Holds tiles of the outputs, int32 [tiles, 3]: the first output and the end of its part, both
    multiples of a unit, and the index of the A that the part reads. Holds the number of splits that
    have ended, for each program of a split; it is 0 between steps.
    """

    def __init__(self, products: Products, device: torch.device) -> None:
        tiles = [
            (first, at.stop, name)
            for at, name in zip(products.columns, products.a_of, strict=True)
            for first in range(at.start, at.stop, OUTPUTS)
        ]
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._unit = math.gcd(OUTPUTS, *(at.stop for at in products.columns))
        columns = products.num_slots * products.rank
        self._blocks = -(-columns // COLUMNS) * len(products.names)
        count = self._blocks * (MAX_TOKENS // ROWS)
        self._ended = torch.zeros(count, dtype=torch.int32, device=device)

    def takes(self, num_tokens: int, rank: int) -> bool:
        return num_tokens <= MAX_TOKENS and rank >= MIN_RANK and rank == power_of_2(rank)

    def down(self, x_TI: Tensor, slots_T: Tensor, a_NPRI: Tensor) -> Tensor:
        num_tokens, inputs = x_TI.shape
        slots, names, rank, _ = a_NPRI.shape
        turns = -(-inputs // INPUTS)
        turns = -(-turns // min(-(-PROGRAMS // self._blocks), MAX_SPLITS))  # of a program
        splits = -(-inputs // (INPUTS * turns))
        h_TPR = x_TI.new_empty((num_tokens, names, rank))
        sums_STPR = x_TI.new_empty((splits, num_tokens, names, rank), dtype=torch.float32)
        rows = _rows(num_tokens)
        _launch_down(
            (self._blocks, splits, -(-num_tokens // rows)),
            (x_TI, a_NPRI, slots_T, sums_STPR, h_TPR, self._ended, num_tokens),
            (inputs, slots, names, rank, splits, turns, rows, INPUTS, COLUMNS),
            dtype=(x_TI.dtype, slots_T.dtype), num_warps=8, num_stages=1,
        )  # fmt: skip
        return h_TPR

    def up(self, h_TPR: Tensor, y_TO: Tensor, slots_T: Tensor, b_NRO: Tensor) -> None:
        num_tokens, names, rank = h_TPR.shape
        slots, _, outputs = b_NRO.shape
        at_once = min(max(RANKS // rank, 1), power_of_2(slots))
        rows = _rows(num_tokens)
        _launch_up(
            (len(self._tiles), -(-num_tokens // rows), 1),
            (h_TPR, b_NRO, slots_T, self._tiles, y_TO, num_tokens),
            (outputs, slots, names, rank, rows, at_once, OUTPUTS, self._unit),
            dtype=(y_TO.dtype, slots_T.dtype), num_warps=8,
        )  # fmt: skip


def _rows(num_tokens: int) -> int:
    """Return the tokens of a program."""
    return min(max(power_of_2(num_tokens), 16), ROWS)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _down_kernel(
    x_ptr, a_ptr, slots_ptr, sums_ptr, h_ptr, ended_ptr, num_tokens,
    WIDTH: tl.constexpr, N: tl.constexpr, P: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr,
    TURNS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    name = tl.program_id(0) % P
    column = tl.program_id(0) // P * COLUMNS + tl.arange(0, COLUMNS)
    slot, r = column // R, column % R
    split = tl.program_id(1)
    t = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    k = split * TURNS * INPUTS + tl.arange(0, INPUTS)
    of_a = a_ptr + (((slot * P + name) * R + r).to(tl.int64) * WIDTH)[None, :]
    of_x = x_ptr + (t.to(tl.int64) * WIDTH)[:, None]
    in_a, in_t = (slot < N)[None, :], t < num_tokens
    a = tl.load(of_a + k[:, None], mask=in_a & (k < WIDTH)[:, None], other=0.0)
    begin(PDL)
    own = tl.load(slots_ptr + t, mask=in_t, other=0)
    x = tl.load(of_x + k[None, :], mask=in_t[:, None] & (k < WIDTH)[None, :], other=0.0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(1, TURNS):  # the next inputs come while these are multiplied
        k += INPUTS
        next_a = tl.load(of_a + k[:, None], mask=in_a & (k < WIDTH)[:, None], other=0.0)
        next_x = tl.load(of_x + k[None, :], mask=in_t[:, None] & (k < WIDTH)[None, :], other=0.0)
        sums = tl.dot(x, a, sums, input_precision="ieee")
        a, x = next_a, next_x
    sums = tl.dot(x, a, sums, input_precision="ieee")
    is_own = own[:, None] == slot[None, :] + 1
    at = ((t * P + name) * R)[:, None] + r[None, :]
    if SPLITS > 1:
        step = num_tokens * P * R
        tl.store(sums_ptr + split * step + at, sums, mask=is_own)
        tl.debug_barrier()
        ended = ended_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(ended, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(ended, 0)
        tl.debug_barrier()
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for other in tl.static_range(SPLITS):
            sums += tl.load(sums_ptr + other * step + at, mask=is_own, other=0.0)
    tl.store(h_ptr + at, sums.to(h_ptr.dtype.element_ty), mask=is_own)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _up_kernel(
    h_ptr, b_ptr, slots_ptr, tiles_ptr, y_ptr, num_tokens,
    WIDTH: tl.constexpr, N: tl.constexpr, P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, OUTPUTS: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tiles_ptr + tl.program_id(0) * 3
    o = tl.multiple_of(tl.load(tile), UNIT) + tl.arange(0, OUTPUTS)
    in_o = o < tl.multiple_of(tl.load(tile + 1), UNIT)
    name = tl.load(tile + 2)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, R)
    row = tl.arange(0, AT_ONCE * R)
    in_b = (row < N * R)[:, None] & in_o[None, :]
    b = tl.load(b_ptr + row[:, None] * WIDTH + o[None, :], mask=in_b, other=0.0)
    begin(PDL)
    own = tl.load(slots_ptr + t, mask=t < num_tokens, other=0)
    is_adapted = (own > 0)[:, None]  # only these tokens have sums
    to = y_ptr + t[:, None].to(tl.int64) * WIDTH + o[None, :]
    y = tl.load(to, mask=is_adapted & in_o[None, :], other=0.0).to(tl.float32)
    h = tl.load(h_ptr + ((t * P + name) * R)[:, None] + r[None, :], mask=is_adapted, other=0.0)
    for first in tl.static_range(0, N, AT_ONCE):
        if first:
            row = first * R + tl.arange(0, AT_ONCE * R)
            in_b = (row < N * R)[:, None] & in_o[None, :]
            at = row[:, None].to(tl.int64) * WIDTH + o[None, :]
            b = tl.load(b_ptr + at, mask=in_b, other=0.0)
        is_own = own[:, None] == (first + 1 + tl.arange(0, AT_ONCE))[None, :]
        wide = tl.where(is_own[:, :, None], h[:, None, :], 0.0)
        y = tl.dot(tl.reshape(wide, [ROWS, AT_ONCE * R]), b, y, input_precision="ieee")
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=is_adapted & in_o[None, :])


_launch_down = Launcher(_down_kernel)
_launch_up = Launcher(_up_kernel)
