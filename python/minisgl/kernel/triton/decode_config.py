"""Chooses the kernel config of decode attention, and the number of programs that run at once.

The choice depends on the number of rows and heads and on the device, by measurements on one H200.
The device itself divides the contexts (`minisgl.kernel.triton.kv_split`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SPLITS = 64
"""Splits of one context at most. One program merges them."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The config of a decode program.

    keys: read in one iteration. warps, stages: Triton's. programs: how many a multiprocessor runs
    at once, as shared memory and registers allow. heads: with latents, those of a program's
    tile, a power of two.
    """

    keys: int
    warps: int
    stages: int
    programs: int
    heads: int = 0


DEEP, LIGHT = DecodeConfig(64, 2, 6, 3), DecodeConfig(64, 2, 4, 4)
"""The two best of five configs with up to twelve splits, for 24 to 256 rows with 2 and with 8 heads
(`pieces_of_decode_attention_us` in benchmarks/results/h200-experiments.json)."""
DEEP_8, LIGHT_8 = DecodeConfig(64, 2, 6, 5), DecodeConfig(64, 2, 6, 4)
"""The same for keys and values of 8 bits. DEEP_8 is one of the three best of ten for 256 rows of 8
heads with fp8; int8 has registers for four programs."""
FULL = 2 / 3
"""From this share of the programs that could run, DEEP is chosen. LIGHT was better at a share of
0.65 (128 rows of 2 heads), DEEP at 0.81 (160 rows). Not measured between, and not since contexts
are split by their lengths: then each row had the same number of splits."""
FEW_BELOW = 64
"""A step has few rows if rows times heads are below this. With a `Rotation` it then has kernels of
its own for each number of splits. They fetch their first keys before the kernel before them ends.
Not measured between 8 and 128."""
WIDE, WIDE_FLOAT32 = DecodeConfig(32, 2, 3, 4), DecodeConfig(32, 2, 2, 4)
"""For heads above 128 dims, and for float32; they are what shared memory holds. WIDE is the best of
eight for 64 rows of 16 heads of 256 dims."""
WIDEST = DecodeConfig(32, 4, 3, 2)
"""For heads above 256 dims, for which the registers of two warps do not suffice."""
WIDE_FEW, WIDEST_FEW = DecodeConfig(64, 8, 2, 2), DecodeConfig(32, 8, 3, 2)
"""The same for a step of few rows with a `Rotation`: few programs run, so each has more warps."""
LATENT, LATENT_MANY = DecodeConfig(32, 4, 3, 2, heads=16), DecodeConfig(64, 8, 2, 1, heads=64)
"""For latents, the best of five on an H200. LATENT_MANY is for Hopper's matrix instructions, which
take 64 heads."""
LATENT_FLOAT32 = DecodeConfig(16, 4, 1, 2, heads=16)
"""Keys of float32 take twice the shared memory, so a program has half of the keys."""
LATENT_MANY_FROM = 16
"""With fewer rows, programs of 64 heads would be too few for all multiprocessors."""


def decode_config(
    pairs: int,
    num_cores: int,
    block_h: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    is_few: bool = False,
) -> DecodeConfig:
    """Return the config. pairs: rows times key/value heads. block_h: the head dim, padded.
    kv_dtype: of the cache. is_few: whether the step has few rows, and a `Rotation`."""

    def splits(config: DecodeConfig) -> int:
        return num_cores * config.programs // pairs  # per pair, if all run at once

    if dtype.itemsize != 2:
        return WIDE_FLOAT32
    if block_h > 256:
        return WIDEST_FEW if is_few else WIDEST
    if block_h > 128:
        return WIDE_FEW if is_few else WIDE
    deep, light = DEEP, LIGHT
    if kv_dtype.itemsize == 1:
        deep, light = LIGHT_8 if kv_dtype == torch.int8 else DEEP_8, LIGHT_8
    if splits(LIGHT) == 0:
        return deep
    is_full = splits(DEEP) * pairs >= FULL * num_cores * DEEP.programs
    return deep if is_full and pairs >= FEW_BELOW else light


def latent_config(
    num_rows: int, num_heads: int, dtype: torch.dtype, *, is_hopper: bool
) -> DecodeConfig:
    """Return the config for latents."""
    if dtype.itemsize != 2:
        return LATENT_FLOAT32
    is_many = num_rows >= LATENT_MANY_FROM and num_heads >= LATENT_MANY.heads
    return LATENT_MANY if is_many and is_hopper else LATENT


def num_groups(num_heads: int, config: DecodeConfig) -> int:
    """Return into how many groups of one size the heads are divided that attend to latents."""
    least = -(-num_heads // config.heads)
    return next(count for count in range(least, num_heads + 1) if num_heads % count == 0)


def few_splits(pairs: int, num_cores: int, config: DecodeConfig) -> int:
    """Return the splits of each context in a step of few rows: a power of two, because a kernel is
    compiled for each number, which takes a second."""
    count = min(max(num_cores * config.programs // pairs, 1), MAX_SPLITS)
    return 1 << (count.bit_length() - 1)


def splits_at_once(num_kv_heads: int, num_cores: int, config: DecodeConfig) -> int:
    """Return how many splits of all contexts run at once, each for all heads."""
    return max(num_cores * config.programs // num_kv_heads, 1)
