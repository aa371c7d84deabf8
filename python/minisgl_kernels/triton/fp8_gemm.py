"""GEMMs of 17 to 64 rows on fp8 tensor cores, near the time of reading the weights.

As many programs as run at once share the tiles of outputs evenly: each has as many steps of 128
inputs as the others, and may begin and end within a tile (Stream-K, Osama et al. 2023). The last
program of a tile to end adds up the partial sums, in the order of the programs. cuBLAS has a
program for each tile, so matrices of few outputs leave most of the device idle. Weights are the
left operand, and a program has all rows, so that each weight is read once. What a step adds is
multiplied by the scales of weights and activations in float32.

Axes: M rows, F outputs, D inputs, d steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin

STEP = 128
"""Inputs of a step, which are those of a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """outputs, rows: of a program's tile. warps, stages: Triton's. programs: of a multiprocessor at
    once."""

    outputs: int
    rows: int
    warps: int
    stages: int
    programs: int


STREAMS = (
    StreamConfig(outputs=128, rows=32, warps=4, stages=5, programs=2),
    StreamConfig(outputs=128, rows=64, warps=4, stages=4, programs=2),
)
"""Microseconds on an H200, qkv, o, gate and up, down of 14B: 32 rows 17.4, 15.0, 53.3, 31.3 (cuBLAS
17.6, 17.2, 56.6, 49.4), 64 rows 21.5, 18.1, 66.3, 38.7 (17.7, 17.3, 62.3, 49.6)."""


def choose_stream(rows: int, outputs: int, inputs: int) -> StreamConfig | None:
    """Return the config of a GEMM, or None if cuBLAS is faster."""
    for config in STREAMS if inputs > 2 * outputs else STREAMS[:1]:
        if rows <= config.rows:
            return config
    return None


def stream_gemm(
    numbers_MD: Tensor,
    scale_dM: Tensor,
    weight_FD: Tensor,
    weight_scale_fd: Tensor,
    rows: int,
    dtype: torch.dtype,
    config: StreamConfig,
    num_cores: int,
    done: Tensor,
) -> Tensor:
    """Return [rows, F] = x @ weight.T of fp8 numbers with scales for 1 x 128 and 128 x 128.

    numbers_MD, scale_dM: see `fp8.quantise`; `rows` of them count. F and D are multiples of 128.
    done: int32 zeros, one for each tile; zeros again afterwards.
    """
    (outputs, inputs), device = weight_FD.shape, weight_FD.device
    out_MF = torch.empty((rows, outputs), dtype=dtype, device=device)
    steps = outputs // config.outputs * (inputs // STEP)
    programs = min(config.programs * num_cores, steps)
    shape = (programs, 2, config.outputs, config.rows)
    partial = torch.empty(shape, dtype=torch.float32, device=device)
    _launch(
        (programs, 1, 1),
        (
            numbers_MD, scale_dM, weight_FD, weight_scale_fd, out_MF, partial, done, rows,
            scale_dM.shape[1] // 16,
        ),
        (outputs, inputs, config.outputs, config.rows, programs),
        dtype=dtype, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out_MF


@triton.jit
def _rows_of(first, M16, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows, their places in x, and which of them x has."""
    m = first + tl.arange(0, BLOCK)
    inside = m < M16 * 16
    return m, tl.where(inside, m, 0) * D, inside


@triton.jit
def _product(w, w_scale, x_ptr, x_scale_ptr, at, m, inside, step, M16):
    """Return what a step adds for some rows."""
    x = tl.load(x_ptr + at[None, :] + (step * 128 + tl.arange(0, 128))[:, None])
    x_scale = tl.load(x_scale_ptr + step * (M16 * 16) + m, mask=inside, other=0.0)
    return tl.dot(w, x) * (x_scale * w_scale)[None, :]


@triton.jit
def _write(out_ptr, acc, m, f, M, F: tl.constexpr):
    out = out_ptr + m[None, :].to(tl.int64) * F + f[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[None, :])


@triton.jit(do_not_specialize=["M", "M16"])
def _stream_gemm(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, partial_ptr, done_ptr, M, M16,
    F: tl.constexpr, D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_M: tl.constexpr,
    PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M16: sixteens of rows that x has."""
    STEPS: tl.constexpr = D // 128
    TOTAL: tl.constexpr = F // BLOCK_F * STEPS
    SUMS: tl.constexpr = BLOCK_F * BLOCK_M
    program = tl.program_id(0)
    m, x_at, inside = _rows_of(0, M16, D, BLOCK_M)
    i = tl.arange(0, BLOCK_F)[:, None]
    sums = i * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    at = program * TOTAL // PROGRAMS
    end = (program + 1) * TOTAL // PROGRAMS
    begin(PDL)
    while at < end:
        tile = at // STEPS
        first = at % STEPS
        last = tl.minimum(first + end - at, STEPS)
        f = tile * BLOCK_F + tl.arange(0, BLOCK_F)
        w_at = f.to(tl.int64)[:, None] * D + tl.arange(0, 128)[None, :]
        acc = tl.zeros([BLOCK_F, BLOCK_M], tl.float32)
        for step in range(first, last):
            w = tl.load(w_ptr + w_at + step * 128)
            w_scale = tl.load(w_scale_ptr + tile * BLOCK_F // 128 * STEPS + step)
            acc += _product(w, w_scale, x_ptr, x_scale_ptr, x_at, m, inside, step, M16)
        if last - first == STEPS:
            _write(out_ptr, acc, m, f, M, F)
        else:
            # Two places for a program: the tile within which it begins has the first.
            mine = partial_ptr + (program * 2 + (first == 0).to(tl.int32)).to(tl.int64) * SUMS
            tl.store(mine + sums, acc)
            one = ((tile * STEPS + 1) * PROGRAMS - 1) // TOTAL
            other = ((tile + 1) * STEPS * PROGRAMS - 1) // TOTAL
            tl.debug_barrier()
            if tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") == other - one:
                tl.store(done_ptr + tile, 0)
                tl.debug_barrier()
                acc = tl.zeros([BLOCK_F, BLOCK_M], tl.float32)
                for p in range(one, other + 1):
                    place = (p * TOTAL // PROGRAMS <= tile * STEPS).to(tl.int32)
                    theirs = partial_ptr + (p * 2 + place).to(tl.int64) * SUMS
                    acc += tl.load(theirs + sums, cache_modifier=".cg")
                _write(out_ptr, acc, m, f, M, F)
        at += last - first


_launch = Launcher(_stream_gemm)
