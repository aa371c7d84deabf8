"""How decode attention is cut: which form its programs have, and into how many pieces a context.

Decided by the number of rows and heads and the device alone, by numbers measured on one H200. See
`minisgl.kernel.triton.decode_attention`, whose programs these are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.kernel.sizes import power_of_2

MAX_PIECES = 64


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
rows of 2 heads), DEEP at 0.81 (160); not measured between."""
FEW_BELOW = 64
"""Rows times heads of steps where `Rotation` has kernels of its own for each number of pieces, a
power of two, which fetch their first keys before the kernel before them has ended. Not measured
between 8 and 128."""
WIDE, WIDE_FLOAT32 = DecodeForm(32, 2, 3, 4), DecodeForm(32, 2, 2, 4)
"""For other heads than those of up to 128 dims in 16 bits; not tuned, what shared memory holds."""
SHARED_PIECES = 16
"""Of a shared beginning: with 128 rows and 8 heads, 512 programs for 132 multiprocessors."""


def decode_form(
    pairs: int, num_cores: int, block_h: int, dtype: torch.dtype
) -> tuple[DecodeForm, int]:
    """For so many rows times heads of keys: the form, and pieces of a context at most."""
    pairs = max(pairs, 1)

    def pieces(form: DecodeForm) -> int:
        return num_cores * form.programs // pairs  # that all run at once

    if dtype.itemsize != 2:
        form = WIDE_FLOAT32
    elif block_h > 128:
        form = WIDE
    elif pieces(LIGHT) == 0:
        form = DEEP
    else:
        is_full = pieces(DEEP) * pairs >= FULL * num_cores * DEEP.programs
        form = DEEP if is_full and pairs >= FEW_BELOW else LIGHT
    count = min(max(pieces(form), 1), MAX_PIECES)
    return form, 1 << (count.bit_length() - 1) if pairs < FEW_BELOW else count


def num_counters(num_cores: int) -> int:
    """What `decode` needs of `done`: contexts are cut only where fewer programs would run."""
    return num_cores * max(form.programs for form in (DEEP, LIGHT, WIDE, WIDE_FLOAT32))


def slot_constants(pairs: int, pieces: int, cascade: bool, rotates: bool) -> tuple[int, int]:
    """Of a decode kernel: the number of pieces, or 0 for as many as are launched, and a power of
    two that holds all slots. Of few kinds: each is another kernel, which takes a second to compile.
    """
    slots = pieces + (SHARED_PIECES if cascade else 0)
    if rotates and pairs < FEW_BELOW:
        return pieces, power_of_2(slots)
    return 0, 1 if slots == 1 else 8 if slots <= 8 else max(power_of_2(slots), MAX_PIECES)
