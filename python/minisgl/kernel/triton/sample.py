"""Greedy and random choice of the next token, without sorting or copying the logits; and the mask
of tokens that are forbidden.

The noise is that of `minisgl.kernel.sampling`, generated where it is used. The largest of
logit / temperature + Gumbel noise is a draw from the softmax (the Gumbel-max trick), so there is no
pass for a maximum or a normaliser. One launch finds the best token of each chunk of the vocabulary,
another one the best of all chunks.

Axes: S rows that sample, V vocabulary, C chunks of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2

MASK_BLOCK = 4096
"""A program takes so many tokens of a row, whose mask is 512 bytes: one read of four warps."""
CHUNK = 4096
"""Vocabulary entries of a program: 38 programs for each row of Qwen's 151,936."""
LIMITS_CHUNK = 2048
"""The same with `Limits`: 75 programs for each of these rows."""

LARGEST_UNIFORM = tl.constexpr(1 - 2**-24)
SMALLEST_TEMPERATURE = tl.constexpr(1e-30)  # so that no division overflows


@dataclass(frozen=True, slots=True)
class Limits:
    """Which entries of each row pass top-k, top-p and min-p (`minisgl_kernels.triton.threshold`).

    thresholds_S: float32, entries below it are dropped; minus infinity for a greedy row.
    largest_SC: float32, the largest logit of each chunk of `LIMITS_CHUNK` entries; not set for a
    greedy row.
    """

    thresholds_S: Tensor
    largest_SC: Tensor


def choose(
    logits_SV: Tensor,
    temperatures_S: Tensor | None = None,
    seeds_S: Tensor | None = None,
    output_idxs_S: Tensor | None = None,
    limits: Limits | None = None,
) -> Tensor:
    """Return int32 [S]: the id of each row's first largest logit; with temperatures, see
    `Ops.sample`. -1 for a row whose best score is not finite.

    limits: None without filters.
    """
    num_rows, num_vocab = logits_SV.shape
    chunk = CHUNK if limits is None else LIMITS_CHUNK
    chunks = -(-num_vocab // chunk)
    best_SC = torch.empty((num_rows, chunks), dtype=torch.float32, device=logits_SV.device)
    where_SC = torch.empty((num_rows, chunks), dtype=torch.int32, device=logits_SV.device)
    out_S = torch.empty(num_rows, dtype=torch.int32, device=logits_SV.device)
    random = temperatures_S is not None
    draw = (temperatures_S, seeds_S, output_idxs_S) if random else (logits_SV,) * 3
    dtype = logits_SV.dtype
    filters = (limits.thresholds_S, limits.largest_SC) if limits else (best_SC,) * 2
    _launch_chunks(
        (num_rows, chunks, 1), (logits_SV, *draw, *filters, best_SC, where_SC),
        (logits_SV.stride(0), num_vocab, random, limits is not None, chunk),
        dtype=dtype, num_warps=chunk // 1024,
    )  # fmt: skip
    _launch_rows(
        (num_rows, 1, 1), (best_SC, where_SC, out_S), (chunks, power_of_2(chunks)),
        dtype=dtype, num_warps=1,
    )  # fmt: skip
    return out_S


@triton.jit
def _best_of_chunk(
    logits_ptr, temperature_ptr, seed_ptr, output_idx_ptr, threshold_ptr, largest_ptr, best_ptr,
    where_ptr,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, RANDOM: tl.constexpr, FILTERED: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    if FILTERED:
        threshold = tl.load(threshold_ptr + row)
        # A greedy row's threshold is minus infinity: no chunk is below it, whatever `largest` has.
        if tl.load(largest_ptr + row * chunks + chunk) < threshold:
            tl.store(best_ptr + row * chunks + chunk, -float("inf"))
            tl.store(where_ptr + row * chunks + chunk, chunk * CHUNK)
            return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    row_ptr = logits_ptr + row.to(tl.int64) * STRIDE
    score = tl.load(row_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if FILTERED:
        score = tl.where(score >= threshold, score, -float("inf"))
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            seed = tl.load(seed_ptr + row)
            index = tl.load(output_idx_ptr + row)
            groups = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
            low = (index & 0xFFFFFFFF).to(tl.uint32)
            high = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32)
            zero = tl.zeros([CHUNK // 4], tl.uint32)
            w0, w1, w2, w3 = tl.philox(seed, groups.to(tl.uint32), low + zero, high + zero, zero)
            word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
            noise = _gumbel(word)
            score = score * (1.0 / tl.maximum(temperature, SMALLEST_TEMPERATURE)) + noise
    best, where = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row * chunks + chunk, best)
    # Among NaNs any entry may be the largest, also padding of the last chunk.
    tl.store(where_ptr + row * chunks + chunk, tl.minimum(chunk * CHUNK + where, VOCAB - 1))


@triton.jit
def _gumbel(word):
    """Return -log(-log1p(-x)) of x in (0, 1), made of `word`. The largest noise comes from small x,
    where 1 - x loses the digits of x; there a series is used."""
    x = (word.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    x = tl.minimum(x, LARGEST_UNIFORM)
    series = 1 / 5 + x * (1 / 6 + x * (1 / 7 + x / 8))
    series = x * (1 + x * (1 / 2 + x * (1 / 3 + x * (1 / 4 + x * series))))
    return -tl.log(tl.where(x < 1 / 16, series, -tl.log(1.0 - x)))


@triton.jit
def _best_of_row(
    best_ptr, where_ptr, out_ptr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=-float("inf"))
    top, first = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    first = tl.minimum(first, CHUNKS - 1)
    is_finite = tl.abs(top) < float("inf")  # not true of NaN
    tl.store(out_ptr + row, tl.where(is_finite, tl.load(where_ptr + row * CHUNKS + first), -1))


_launch_chunks = Launcher(_best_of_chunk)
_launch_rows = Launcher(_best_of_row)


def mask(logits_SV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> Tensor:
    """See `Ops.mask`."""
    masked_SV = logits_SV.clone()
    num_vocab = masked_SV.shape[1]
    _launch_mask(
        (len(rows_M), -(-num_vocab // MASK_BLOCK), 1), (masked_SV, rows_M, masks_MW),
        (masked_SV.stride(0), masks_MW.stride(0), num_vocab, MASK_BLOCK),
        dtype=masked_SV.dtype, num_warps=4,
    )  # fmt: skip
    return masked_SV


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "masks_ptr"])
def _mask(
    logits_ptr, rows_ptr, masks_ptr, STRIDE: tl.constexpr, NUM_WORDS: tl.constexpr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    m = tl.program_id(0)
    row = tl.load(rows_ptr + m)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    word = tl.load(masks_ptr + m * NUM_WORDS + ids // 32, mask=inside, other=-1)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    nothing = tl.full([BLOCK], -float("inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * STRIDE + ids, nothing, mask=inside & forbidden)


_launch_mask = Launcher(_mask)
