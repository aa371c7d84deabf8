"""The smallest logit of each row that top-k, top-p and min-p keep, found without sorting.

The limits of top-k and top-p are rounded down to bfloat16: of logits that bfloat16 cannot tell
apart, a filter keeps all or none. What is kept is then chosen by float32.

A float's key is the integer of its bits, with all bits of negative floats flipped: keys have the
order of the floats. The threshold is the greatest key with enough at and above it: k entries for
top-k, and for top-p a share p of the mass that top-k left. Each pass over the row cuts the range of
keys in which the threshold can be into N steps, and finds how much is at and above each step::

    largest   the largest logit of each chunk, and so the end of the range
    above     the entries or mass of each chunk at and above each step        a launch for each pass
    end       the threshold of the key; also min-p

A pass first adds up the results of all chunks of the pass before, and ends at once if the range has
only one key. The range is short from the start. For top-k it begins at the k-th largest of the
chunks' largest logits, because at least k entries reach that. For top-p it begins T ln(V / (1 - p))
below the largest logit, at temperature T, because V entries below that have together less than 1 -
p of the mass. So bfloat16 mostly needs two or three of its four passes, unless k is larger than the
number of chunks, or the range of a top-p contains 0, near which keys are dense. A chunk whose
largest logit is below the range is not read, except for the total of a top-p. With a top-k of 20
these are most chunks, and `sample.choose` does not read them either. Selection by digits of keys is
radix select (Alabi et al. 2012). Sums have a fixed order, so a row's threshold depends only on that
row.

Axes: S rows that sample, V vocabulary, C chunks of it, N steps of a range, P passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl.kernel.triton.sample import LIMITS_CHUNK as CHUNK
from minisgl.kernel.triton.sample import Limits

NUM_WARPS = 2
"""A thread then holds 32 entries, which fit its registers beside the sums of 16 steps."""
STEP_BITS = 4  # a pass finds so many bits of a key, because it counts by 16 steps
NUM_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 16}
"""The bits of a float32 by which values of the dtype are told apart. Float32 is rounded down to
bfloat16, because each further bit takes time."""

LOWEST_KEY = tl.constexpr(0x007FFFFF)  # minus infinity has it: such a threshold drops nothing


def limits(
    logits_SV: Tensor,
    temperatures_S: Tensor,
    top_ks_S: Tensor | None,
    top_ps_S: Tensor | None,
    min_ps_S: Tensor | None,
) -> Limits:
    """Return the limits of the filters of `Ops.sample`. No filter is None, top_k 0, top_p 1, min_p
    0.

    The device finds which filters a row uses. With a kernel for each combination, requests would
    wait for compiling.
    """
    num_rows, num_vocab = logits_SV.shape
    dtype, device = logits_SV.dtype, logits_SV.device
    chunks = -(-num_vocab // CHUNK)
    passes = -(-NUM_BITS[dtype] // STEP_BITS)
    largest_SC = torch.empty((num_rows, chunks), dtype=torch.float32, device=device)
    thresholds_S = torch.empty(num_rows, dtype=torch.float32, device=device)
    floors_S = torch.empty(num_rows, dtype=torch.int32, device=device)
    _launch_largest(
        (num_rows, chunks, 1), (logits_SV, temperatures_S, largest_SC, floors_S),
        (logits_SV.stride(0), num_vocab, CHUNK), dtype=dtype, num_warps=NUM_WARPS,
    )  # fmt: skip
    steps = 1 << STEP_BITS
    found = (
        torch.empty((passes, num_rows, chunks, steps), dtype=torch.float32, device=device),  # above
        torch.empty((num_rows, chunks), dtype=torch.float32, device=device),  # totals
        torch.empty((passes, num_rows), dtype=torch.int32, device=device),  # firsts of ranges
        torch.empty((passes, num_rows), dtype=torch.int32, device=device),  # steps of ranges
    )
    # Without min-p the kernel does not read this, but it needs a tensor of min-p's dtype.
    min_p_or_unread_S = temperatures_S if min_ps_S is None else min_ps_S
    constants = (num_vocab, 32 - NUM_BITS[dtype], steps, power_of_2(chunks))

    def end(limit_S: Tensor, weighted: bool, turn: int) -> None:
        _launch_end(
            (num_rows, 1, 1),
            (
                temperatures_S, limit_S, min_p_or_unread_S, largest_SC, *found, floors_S,
                thresholds_S, chunks, turn, int(min_ps_S is not None),
            ),
            (weighted, *constants),
            dtype=dtype, num_warps=NUM_WARPS,
        )  # fmt: skip

    for limit_S, weighted in ((top_ks_S, False), (top_ps_S, True)):
        if limit_S is None:
            continue
        for turn in range(passes):
            _launch_above(
                (num_rows, chunks, 1),
                (logits_SV, temperatures_S, limit_S, largest_SC, *found, floors_S, turn),
                (logits_SV.stride(0), CHUNK, weighted, *constants),
                dtype=dtype, num_warps=NUM_WARPS,
            )  # fmt: skip
        end(limit_S, weighted, passes)
    if top_ks_S is None and top_ps_S is None:
        end(temperatures_S, True, 0)
    return Limits(thresholds_S, largest_SC)


@triton.jit
def _largest_kernel(
    logits_ptr, temperature_ptr, largest_ptr, floor_ptr,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the largest logit of each chunk, and set floors to zero."""
    begin(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(temperature_ptr + row) > 0:
        x = _load(logits_ptr, row, chunk, STRIDE, VOCAB, CHUNK)
        tl.store(largest_ptr + row * tl.num_programs(1) + chunk, tl.max(x, 0))
        if chunk == 0:
            tl.store(floor_ptr + row, 0)


@triton.jit(do_not_specialize=["turn"])
def _above_kernel(
    logits_ptr, temperature_ptr, limit_ptr, largest_ptr, above_ptr, total_ptr, first_ptr, step_ptr,
    floor_ptr, turn,
    STRIDE: tl.constexpr, CHUNK: tl.constexpr, WEIGHTED: tl.constexpr, VOCAB: tl.constexpr,
    UNIT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store above [turn, row, chunk]: the number of entries, or the mass, at and above each step;
    the range's first unit and its step; and in the first turn of a top-p the mass of all."""
    begin(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    rows = tl.num_programs(0)
    chunks = tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    limit = tl.load(limit_ptr + row).to(tl.float32)
    active = (temperature > 0) & _drops(limit, WEIGHTED, VOCAB)
    if not active:
        return
    floor = tl.load(floor_ptr + row).to(tl.uint32, bitcast=True)
    if turn == 0:
        first, step = _whole_range(
            largest_ptr, limit, temperature, floor, row, chunks, WEIGHTED, VOCAB, UNIT, STEPS, BLOCK
        )
    else:
        first, step = _range(
            above_ptr, total_ptr, first_ptr, step_ptr, limit, row, rows, chunks, turn,
            WEIGHTED, STEPS, BLOCK,
        )  # fmt: skip
    if chunk == 0:
        tl.store(first_ptr + turn * rows + row, first.to(tl.int32, bitcast=True))
        tl.store(step_ptr + turn * rows + row, step.to(tl.int32, bitcast=True))
    if step == 0:
        return
    least = tl.maximum(first << UNIT, floor)
    totals = (turn == 0) & WEIGHTED
    index = tl.arange(0, STEPS)
    above = tl.zeros([STEPS], tl.float32)
    total = 0.0
    largest = _key_of(tl.load(largest_ptr + row * chunks + chunk))
    if largest >= tl.where(totals, floor, least):
        x = _load(logits_ptr, row, chunk, STRIDE, VOCAB, CHUNK)
        key = _key_of(x)
        weight = tl.full([CHUNK], 1.0, tl.float32)
        if WEIGHTED:
            highest = _highest(largest_ptr, row, chunks, BLOCK)
            weight = tl.exp((x - highest) * (1.0 / tl.maximum(temperature, 1e-30)))
            if totals:
                total = tl.sum(tl.where(key >= floor, weight, 0.0), 0)
        if largest >= least:
            for i in tl.static_range(STEPS):
                here = tl.maximum((first + i * step) << UNIT, floor)
                above = tl.where(index == i, tl.sum(tl.where(key >= here, weight, 0.0), 0), above)
    tl.store(above_ptr + ((turn * rows + row) * chunks + chunk) * STEPS + index, above)
    if totals:
        tl.store(total_ptr + row * chunks + chunk, total)


@triton.jit(do_not_specialize=["chunks", "turn", "has_min_p"])
def _end_kernel(
    temperature_ptr, limit_ptr, min_p_ptr, largest_ptr, above_ptr, total_ptr, first_ptr, step_ptr,
    floor_ptr, out_ptr, chunks, turn, has_min_p,
    WEIGHTED: tl.constexpr, VOCAB: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the threshold. turn: the number of passes, 0 if there is no top-k and no top-p."""
    begin(PDL)
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    threshold = -float("inf")
    if temperature > 0:
        key = tl.load(floor_ptr + row).to(tl.uint32, bitcast=True)
        if turn > 0:
            limit = tl.load(limit_ptr + row).to(tl.float32)
            if _drops(limit, WEIGHTED, VOCAB):
                first, _ = _range(
                    above_ptr, total_ptr, first_ptr, step_ptr, limit, row, tl.num_programs(0),
                    chunks, turn, WEIGHTED, STEPS, BLOCK,
                )  # fmt: skip
                key = tl.maximum(key, first << UNIT)
                tl.store(floor_ptr + row, key.to(tl.int32, bitcast=True))
        if key > LOWEST_KEY:
            threshold = _float_of(key)
        if has_min_p:
            min_p = tl.load(min_p_ptr + row).to(tl.float32)
            if min_p > 0:
                highest = _highest(largest_ptr, row, chunks, BLOCK)
                threshold = tl.maximum(threshold, highest + temperature * tl.log(min_p))
    tl.store(out_ptr + row, threshold)


@triton.jit
def _drops(limit, WEIGHTED: tl.constexpr, VOCAB: tl.constexpr):
    """Return whether this top-p, or this top-k, drops anything."""
    return (limit < 1) if WEIGHTED else (limit > 0) & (limit < VOCAB)


@triton.jit
def _whole_range(
    largest_ptr, limit, temperature, floor, row, chunks, WEIGHTED: tl.constexpr,
    VOCAB: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return (first unit that the threshold can be, step). A unit is 2 ** UNIT keys, which stand
    for one value of the logits' dtype."""
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    largest = tl.load(largest_ptr + row * chunks + chunk, mask=inside, other=-float("inf"))
    highest = tl.max(largest, 0)
    if WEIGHTED:  # one more temperature, for roundings
        low = highest - temperature * (tl.log(VOCAB / (1 - limit)) + 1)
    else:
        count = tl.sum(((largest[None, :] >= largest[:, None]) & inside[None, :]).to(tl.int32), 1)
        low = tl.max(tl.where(inside & (count >= limit), largest, -float("inf")), 0)
    low = tl.where(low <= highest, low, -float("inf"))  # also of NaNs
    first = tl.maximum(_key_of(low), floor) >> UNIT
    length = (_key_of(highest) >> UNIT) - first + 1
    return first, (length + (STEPS - 1)) // STEPS


@triton.jit
def _range(
    above_ptr, total_ptr, first_ptr, step_ptr, limit, row, rows, chunks, turn,
    WEIGHTED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return (first unit that the threshold can be, step) before `turn`. Step is 0 if the threshold
    must be that unit."""
    at = (turn - 1) * rows + row
    first = tl.load(first_ptr + at).to(tl.uint32, bitcast=True)
    step = tl.load(step_ptr + at).to(tl.uint32, bitcast=True)
    if step > 0:
        chunk = tl.arange(0, BLOCK)
        inside = chunk < chunks
        index = chunk[:, None] * STEPS + tl.arange(0, STEPS)[None, :]
        above = tl.load(above_ptr + at * chunks * STEPS + index, mask=inside[:, None], other=0.0)
        enough = limit
        if WEIGHTED:
            enough *= tl.sum(tl.load(total_ptr + row * chunks + chunk, mask=inside, other=0.0), 0)
        # Sums fall from step to step. NaN is never enough.
        found = tl.maximum(tl.sum((tl.sum(above, 0) >= enough).to(tl.int32), 0) - 1, 0)
        first += found.to(tl.uint32) * step
        step = tl.where(step == 1, 0, (step + (STEPS - 1)) // STEPS)
    return first, step


@triton.jit
def _highest(largest_ptr, row, chunks, BLOCK: tl.constexpr):
    chunk = tl.arange(0, BLOCK)
    largest = tl.load(largest_ptr + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    return tl.max(largest, 0)


@triton.jit
def _load(
    logits_ptr, row, chunk, STRIDE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row_ptr = logits_ptr + row.to(tl.int64) * STRIDE
    x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32)
    return x + 0.0  # makes -0 of the same key as 0


@triton.jit
def _key_of(x):
    """Return the key of a float32: uint32, in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _float_of(key):
    flipped = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    bits = flipped ^ ((flipped >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


_launch_largest = Launcher(_largest_kernel)
_launch_above = Launcher(_above_kernel)
_launch_end = Launcher(_end_kernel)
