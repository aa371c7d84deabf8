"""The least logit that top-k, top-p and min-p leave of each row, found without sorting it.

Floats are ordered like the integers of their bits, once those of negative ones are flipped: their
keys. The key of a threshold is built from its highest digit down; of the digits that leave enough
above, the greatest is taken. "Enough" is k entries for top-k, and for top-p p of the mass that
top-k left. So filters are passes over the row, one for each digit::

    largest   the largest logit of each chunk
    above     what each chunk has at and above the key with each next digit     a launch for a digit
    end       the key as a threshold; also min-p

A pass begins with adding up what all chunks had in the one before. A chunk whose largest logit is
below the key has nothing above it and is not read: after the first passes of a top-k of 20 these
are most, for `sample.choose` too. Selection by digits is the idea of radix select (Alabi et al.
2012). Sums have one order, so a row's threshold depends on that row alone.

Axes: S rows that sample, V vocabulary, C chunks of it, N digits, P passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2

CHUNK = 2048
"""Vocabulary entries a program: 75 programs a row of Qwen's 151,936."""
NUM_WARPS = 2
DIGIT_BITS = 4
NUM_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}
"""Of a float32 that holds such a value, those that may differ from one value to another."""

LOWEST_KEY = tl.constexpr(0x007FFFFF)  # of minus infinity: what is not above it drops nothing


@dataclass(frozen=True, slots=True)
class Limits:
    """What filters leave of each row."""

    thresholds_S: Tensor
    """float32: entries below it are dropped; minus infinity for a greedy row."""
    largest_SC: Tensor
    """float32: the largest logit of each chunk of `CHUNK`; a greedy row's are not set."""


def limits(
    logits_SV: Tensor,
    temperatures_S: Tensor,
    top_ks_S: Tensor | None,
    top_ps_S: Tensor | None,
    min_ps_S: Tensor | None,
) -> Limits:
    """The filters are those of `Ops.sample`; None, top_k 0, top_p 1 and min_p 0 are none.

    Which of them a row uses is found out on the device: a kernel for each combination would have
    to be compiled when a request first asks for it.
    """
    num_rows, num_vocab = logits_SV.shape
    dtype, device = logits_SV.dtype, logits_SV.device
    chunks = -(-num_vocab // CHUNK)
    block = power_of_2(chunks)
    digits = 1 << DIGIT_BITS
    shifts = range(32 - DIGIT_BITS, 32 - NUM_BITS[dtype] - DIGIT_BITS, -DIGIT_BITS)
    largest_SC = torch.empty((num_rows, chunks), dtype=torch.float32, device=device)
    thresholds_S = torch.empty(num_rows, dtype=torch.float32, device=device)
    floors_S = torch.empty(num_rows, dtype=torch.int32, device=device)
    _launch_largest(
        (num_rows, chunks, 1), (logits_SV, temperatures_S, largest_SC, floors_S),
        (logits_SV.stride(0), num_vocab, CHUNK), dtype=dtype, num_warps=NUM_WARPS,
    )  # fmt: skip
    sums_PSCN = torch.empty(
        (len(shifts), num_rows, chunks, digits), dtype=torch.float32, device=device
    )
    keys_PS = torch.empty((len(shifts), num_rows), dtype=torch.int32, device=device)
    # Not read where there is no min-p, but of its dtype, for which the kernel is compiled.
    min_p_or_unread_S = temperatures_S if min_ps_S is None else min_ps_S

    def end(limit_S: Tensor, weighted: bool, turn: int) -> None:
        _launch_end(
            (num_rows, 1, 1),
            (
                temperatures_S, limit_S, min_p_or_unread_S, largest_SC, sums_PSCN, keys_PS,
                floors_S, thresholds_S, chunks, turn, shifts[-1], int(min_ps_S is not None),
            ),
            (num_vocab, weighted, digits, block),
            dtype=dtype, num_warps=NUM_WARPS,
        )  # fmt: skip

    for limit_S, weighted in ((top_ks_S, False), (top_ps_S, True)):
        if limit_S is None:
            continue
        for turn, shift in enumerate(shifts):
            _launch_above(
                (num_rows, chunks, 1),
                (
                    logits_SV, temperatures_S, limit_S, largest_SC, sums_PSCN, keys_PS, floors_S,
                    turn, shifts[turn - 1], shift,
                ),
                (logits_SV.stride(0), num_vocab, weighted, digits, CHUNK, block),
                dtype=dtype, num_warps=NUM_WARPS,
            )  # fmt: skip
        end(limit_S, weighted, len(shifts))
    if top_ks_S is None and top_ps_S is None:
        end(temperatures_S, True, 0)
    return Limits(thresholds_S, largest_SC)


@triton.jit
def _largest_kernel(
    logits_ptr, temperature_ptr, largest_ptr, floor_ptr,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Also sets floors to zero."""
    begin(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(temperature_ptr + row) > 0:
        x = _load(logits_ptr, row, chunk, STRIDE, VOCAB, CHUNK)
        tl.store(largest_ptr + row * tl.num_programs(1) + chunk, tl.max(x, 0))
        if chunk == 0:
            tl.store(floor_ptr + row, 0)


@triton.jit(do_not_specialize=["turn", "shift_before", "shift"])
def _above_kernel(
    logits_ptr, temperature_ptr, limit_ptr, largest_ptr, sums_ptr, keys_ptr, floor_ptr,
    turn, shift_before, shift,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, WEIGHTED: tl.constexpr, DIGITS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums [turn, row, chunk]: how many entries, or how much mass, at and above each digit."""
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
    key = tl.full([], 0, tl.uint32)
    if turn > 0:
        key = _key(
            sums_ptr, keys_ptr, limit, row, rows, chunks, turn, shift_before,
            WEIGHTED, DIGITS, BLOCK,
        )  # fmt: skip
    if chunk == 0:
        tl.store(keys_ptr + turn * rows + row, key.to(tl.int32, bitcast=True))
    floor = tl.load(floor_ptr + row).to(tl.uint32, bitcast=True)
    digit = tl.arange(0, DIGITS)
    above = tl.zeros([DIGITS], tl.float32)
    largest = tl.load(largest_ptr + row * chunks + chunk)
    if _key_of(largest) >= tl.maximum(key, floor):
        x = _load(logits_ptr, row, chunk, STRIDE, VOCAB, CHUNK)
        key_of_x = _key_of(x)
        weight = tl.full([CHUNK], 1.0, tl.float32)
        if WEIGHTED:
            highest = _highest(largest_ptr, row, chunks, BLOCK)
            weight = tl.exp((x - highest) * (1.0 / tl.maximum(temperature, 1e-30)))
        for i in tl.static_range(DIGITS):
            least = tl.maximum(key + (tl.full([], i, tl.uint32) << shift.to(tl.uint32)), floor)
            total = tl.sum(tl.where(key_of_x >= least, weight, 0.0), 0)
            above = tl.where(digit == i, total, above)
    tl.store(sums_ptr + ((turn * rows + row) * chunks + chunk) * DIGITS + digit, above)


@triton.jit(do_not_specialize=["chunks", "turn", "shift_before", "has_min_p"])
def _end_kernel(
    temperature_ptr, limit_ptr, min_p_ptr, largest_ptr, sums_ptr, keys_ptr, floor_ptr, out_ptr,
    chunks, turn, shift_before, has_min_p,
    VOCAB: tl.constexpr, WEIGHTED: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """turn: how many passes there were, 0 if there is no top-k and no top-p."""
    begin(PDL)
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    threshold = -float("inf")
    if temperature > 0:
        key = tl.load(floor_ptr + row).to(tl.uint32, bitcast=True)
        if turn > 0:
            limit = tl.load(limit_ptr + row).to(tl.float32)
            if _drops(limit, WEIGHTED, VOCAB):
                found = _key(
                    sums_ptr, keys_ptr, limit, row, tl.num_programs(0), chunks, turn, shift_before,
                    WEIGHTED, DIGITS, BLOCK,
                )  # fmt: skip
                key = tl.maximum(key, found)
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
    """Whether this top-p, or this top-k, drops anything."""
    return (limit < 1) if WEIGHTED else (limit > 0) & (limit < VOCAB)


@triton.jit
def _key(
    sums_ptr, keys_ptr, limit, row, rows, chunks, turn, shift,
    WEIGHTED: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The greatest key that leaves enough above, as far as its digits are known before `turn`."""
    chunk = tl.arange(0, BLOCK)
    at = chunk[:, None] * DIGITS + tl.arange(0, DIGITS)[None, :]
    sums = sums_ptr + ((turn - 1) * rows + row) * chunks * DIGITS
    above = tl.sum(tl.load(sums + at, mask=chunk[:, None] < chunks, other=0.0), 0)
    enough = limit
    if WEIGHTED:
        first = sums_ptr + row * chunks * DIGITS
        enough *= tl.sum(tl.load(first + chunk * DIGITS, mask=chunk < chunks, other=0.0), 0)
    # Sums fall with the digit. Of NaNs none is enough.
    digit = tl.maximum(tl.sum((above >= enough).to(tl.int32), 0) - 1, 0)
    key = tl.load(keys_ptr + (turn - 1) * rows + row).to(tl.uint32, bitcast=True)
    return key + (digit.to(tl.uint32) << shift.to(tl.uint32))


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
    """uint32, ordered as the floats are."""
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
