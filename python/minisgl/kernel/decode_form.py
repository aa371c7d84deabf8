"""Which form the programs of decode attention have, and how many of them run side by side.

Decided by the number of rows and heads and the device alone, by numbers measured on one H200. Where
the contexts are cut is decided on the device, see `minisgl.kernel.triton.decode_cut`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_PIECES = 64
"""Of a context; one program merges them."""


@dataclass(frozen=True, slots=True)
class DecodeForm:
    """Of a decode program: keys a turn, warps, stages. programs: that a multiprocessor runs at
    once, which is what shared memory and registers allow."""

    keys: int
    warps: int
    stages: int
    programs: int


DEEP, LIGHT = DecodeForm(64, 2, 6, 3), DecodeForm(64, 2, 4, 4)
"""Of five forms with up to twelve pieces, no two others were better for 24 to 256 rows of 2 and of
8 heads together (`pieces_of_decode_attention_us` in benchmarks/results/h200-experiments.json)."""
FULL = 2 / 3
"""Share of the programs that could run, from which on DEEP is taken: LIGHT was better at 0.65 (128
rows of 2 heads), DEEP at 0.81 (160); not measured between, nor since contexts are cut by their
lengths: then each had as many pieces."""
FEW_BELOW = 64
"""Rows times heads of steps where `Rotation` has kernels of its own for each number of pieces, that
fetch their first keys before the kernel before them has ended. Not measured between 8 and 128."""
WIDE, WIDE_FLOAT32 = DecodeForm(32, 2, 3, 4), DecodeForm(32, 2, 2, 4)
"""For other heads than those of up to 128 dims in 16 bits; not tuned, what shared memory holds."""


def decode_form(pairs: int, num_cores: int, block_h: int, dtype: torch.dtype) -> DecodeForm:
    """For so many rows times heads of keys."""

    def pieces(form: DecodeForm) -> int:
        return num_cores * form.programs // pairs  # that all run at once

    if dtype.itemsize != 2:
        return WIDE_FLOAT32
    if block_h > 128:
        return WIDE
    if pieces(LIGHT) == 0:
        return DEEP
    is_full = pieces(DEEP) * pairs >= FULL * num_cores * DEEP.programs
    return DEEP if is_full and pairs >= FEW_BELOW else LIGHT


def few_pieces(pairs: int, num_cores: int, form: DecodeForm) -> int:
    """Of each context, where `pairs` is below FEW_BELOW: a power of two, so that there are few
    kernels, each of which takes a second to compile."""
    count = min(max(num_cores * form.programs // pairs, 1), MAX_PIECES)
    return 1 << (count.bit_length() - 1)


def pieces_at_once(num_kv_heads: int, num_cores: int, form: DecodeForm) -> int:
    """Pieces of all contexts together that run at once, each for all heads."""
    return max(num_cores * form.programs // num_kv_heads, 1)
