"""Products by packed weights of GGUF files on a GPU: the host side of `tiles_*.cu`.

Up to 8 rows, and pairs of tokens and experts: a warp reads its tiles as fast as it can
(`tiles_few`). Up to `MAX_DECODED` rows, and all logits: rows of x in shared memory (`tiles_many`).
More rows: the weight is dequantised for this product, and cuBLAS multiplies by it.

Kernels are compiled by NVRTC at their first use, for each format, activation and number of columns,
and cached on disk. They need compute capability 8.0 and bfloat16.

Axes: M rows, D inputs, F outputs, T tokens, K experts of a token, L experts of this rank.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from minisgl.kernel.once import JitUnavailable
from minisgl.kernel.ops import Activation, Ops
from minisgl_kernels import CSRC
from minisgl_kernels.cubin import load_cubin
from minisgl_kernels.hopper import Kernels
from minisgl_kernels.tile_grouped import GATES, TileGrouped, form_macros
from minisgl_zoo.gguf.tiles import INPUTS, OUTPUTS, Pairs, TileForm, Tiles

Macros = tuple[tuple[str, int], ...]

MAX_FEW, MAX_DECODED = 8, 64
"""The most rows of tiles_few and of tiles_many. On one H100 the products of a layer of 8B in Q4_K_M
take 62 us with one row, 66 with 8, 107 with 16, 249 with 64 and 451 with 128, dequantised with 128
rows 376; in bfloat16 145, 155, 156, 161 and 181 (README.md)."""
STREAM_ROWS: Final = range(9, 257)
"""The rows for which Hopper has another GEMM (`tile_grouped`). On one H200 the products of a layer
of 8B in Q4_K take 99, 244 and 291 us with 16, 64 and 256 rows by tiles_many or dequantised, and
84, 112 and 235 by it (README.md)."""
WARPS: Final = 8
"""Of a block of tiles_dense and tiles_lanes."""
MANY: Final = (
    {"COLUMNS": 2, "TILES": 2, "OUT_WARPS": 4, "STAGES": 4, "RESIDENT": 2},
    {"COLUMNS": 4, "TILES": 1, "OUT_WARPS": 8, "STAGES": 4, "RESIDENT": 1},
    {"COLUMNS": 8, "TILES": 1, "OUT_WARPS": 8, "STAGES": 3, "RESIDENT": 1},
)
"""Macros of tiles_many: the first that has the rows is taken."""
SETS: Final = 2
"""tiles_many: sets of warps that share the inputs of a block."""
LEAST_STEPS, MOST_SHARES = 8, 8
"""tiles_many: the fewest steps of a block and the most blocks, if several share the inputs."""
EXPERTS: Final = {"EXPERTS": 1, "TILES": 2, "WARPS": 4, "BATCH": 2, "RESIDENT": 4}
"""Macros of tiles_few for pairs of experts."""
SHARED_BYTES: Final = 64 << 10
"""The most that a block takes: what `MANY` needs, and less than any GPU from 8.0 on allows."""


class _Task(ctypes.Structure):
    """struct Task."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("numbers", "factors", "scales", "x", "sums", "bias", "out", "ids", "partial"),
                *("done", "counts", "pairs", "weights"),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("rows", "outputs", "inputs", "stride", "is_float", "experts", "first", "most"),
                "share",
            )
        ),
    )


def macros(form: TileForm, gate: Activation | None = None, **others: int) -> Macros:
    """Return the macros of a kernel. others: its own."""
    return tuple({**form_macros(form), "GATE": GATES[gate], "EXPERTS": 0, **others}.items())


def few_config(tiles: int, gate: Activation | None, num_cores: int) -> dict[str, int]:
    """Return the macros of tiles_few for so many tiles of outputs. They do not depend on the rows,
    so a row comes out the same beside any others."""
    if gate:
        return {"TILES": 2, "WARPS": 4, "BATCH": 2, "RESIDENT": 4}
    if tiles <= 2 * num_cores:  # a multiprocessor holds all of its blocks at once
        return {"TILES": 1, "WARPS": 8, "BATCH": 4, "RESIDENT": 2}
    if tiles <= 16 * num_cores:
        return {"TILES": 1, "WARPS": 8, "BATCH": 2, "RESIDENT": 3}
    return {"TILES": 1, "WARPS": 4, "BATCH": 2, "RESIDENT": 7}


def kernel_cubin(numbers: Macros, name: str, arch: str) -> bytes:
    """Return a compiled kernel. Raises JitUnavailable."""
    defines = ["BFLOAT16=1", *(f"{macro}={value}" for macro, value in numbers)]
    return load_cubin(CSRC, name, arch, defines, ("hopper.cuh", "tile_numbers.cuh", "tiles.cuh"))


@functools.cache
def _kernels(name: str) -> Kernels[Macros]:
    """The kernels of this name on the current device. Raises JitUnavailable and RuntimeError."""
    major, minor = torch.cuda.get_device_capability()
    return Kernels(
        name,
        functools.partial(kernel_cubin, name=name, arch=f"sm_{major}{minor}"),
        "weights of GGUF files are dequantised for each product",
        shared_bytes=SHARED_BYTES,
    )


class TileGemms:
    """As `minisgl_zoo.gguf.tiles.TileProducts` says. Mutable: `_done` counts the blocks that have
    ended a part of the outputs."""

    def __init__(self, ops: Ops, tiles: Tiles) -> None:
        self._ops, self._tiles = ops, tiles
        kernels, numbers = _kernels("tiles_dense"), macros(tiles.form, WARPS=WARPS)
        self._dense = kernels.get(numbers) or kernels.make(numbers)
        self._num_cores = kernels.num_cores
        self._grouped: TileGrouped | None = getattr(ops, "tile_grouped", None)
        if self._grouped:
            self._grouped.prepare(tiles)
        device = tiles.numbers.device
        self._done = torch.zeros(self._num_cores, dtype=torch.int32, device=device)

    @staticmethod
    @functools.cache
    def why_not(dtype: torch.dtype) -> str | None:
        if dtype != torch.bfloat16:
            return "a GPU multiplies packed weights of GGUF files only in bfloat16"
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
            return "packed weights of GGUF files need a GPU of compute capability 8.0"
        try:
            _kernels("tiles_dense").make(macros(TileForm(4, 32, 32), WARPS=WARPS))
        except (JitUnavailable, RuntimeError) as error:
            return f"no kernel can be compiled: {error}"
        return None

    def dense(self) -> Tensor:
        return self._values(self._tiles)

    def dense_rows(self, rows: range) -> Tensor:
        of_rows, tiles = slice(rows.start // OUTPUTS, rows.stop // OUTPUTS), self._tiles
        numbers, factors, scales = (
            each[of_rows] for each in (tiles.numbers, tiles.factors, tiles.scales)
        )
        return self._values(
            replace(tiles, numbers=numbers, factors=factors, scales=scales, outputs=len(rows))
        )

    def rows(self, ids_T: Tensor) -> Tensor:
        return self._values(self._tiles, ids_T.int().contiguous())

    def linear(self, x_MD: Tensor, bias: Tensor | None, gate: Activation | None) -> Tensor:
        outputs = self._tiles.outputs
        if gate and outputs % (2 * OUTPUTS):
            return self._ops.gated(self.linear(x_MD, bias, None), gate)
        width = outputs // 2 if gate else outputs
        out_MF = torch.empty((len(x_MD), width), dtype=x_MD.dtype, device=x_MD.device)
        if self._product(x_MD, bias, gate, out_MF):
            return out_MF
        return self._ops.linear(x_MD, self.dense(), bias, gate)

    def linear_into(self, x_MD: Tensor, bias: Tensor | None, out_MF: Tensor) -> None:
        if self._product(x_MD, bias, None, out_MF):
            return
        out_MF.copy_(self._ops.linear(x_MD, self.dense(), bias))

    def logits(self, x_SD: Tensor) -> Tensor:
        shape = (len(x_SD), self._tiles.outputs)
        out_SF = torch.empty(shape, dtype=torch.float32, device=x_SD.device)
        for rows, out in zip(*(torch.split(x, MAX_DECODED) for x in (x_SD, out_SF)), strict=True):
            if not self._multiply(rows, None, None, out):
                return self._ops.logits(x_SD, self.dense())
        return out_SF

    def experts(
        self, x: Tensor, pairs: Pairs, scales: Tensor | None, out: Tensor, gate: Activation | None
    ) -> bool:
        kernel = _kernels("tiles_few").get(macros(self._tiles.form, gate, **EXPERTS))
        if kernel is None:
            return False
        num_pairs, outputs = out.shape
        task = self._task(
            self._tiles, out, 0, x=x, ids=pairs.ids_TK, counts=pairs.counts_L,
            pairs=pairs.rows_LT, weights=scales,
        )  # fmt: skip
        task.outputs = task.stride = outputs
        task.experts, task.first = len(pairs.held), pairs.held.start
        task.most, task.share = len(pairs.ids_TK), num_pairs // len(x)
        blocks = outputs // OUTPUTS if gate else -(-outputs // (EXPERTS["TILES"] * OUTPUTS))
        if num_pairs:
            _launch("tiles_few", kernel, blocks * pairs.most_parts(MAX_FEW), task, EXPERTS["WARPS"])
        return True

    def _product(
        self, x_MD: Tensor, bias: Tensor | None, gate: Activation | None, out_MF: Tensor
    ) -> bool:
        """Do `_multiply`, or the same with rounded values. Returns whether there is a kernel for so
        many rows."""
        rows = len(x_MD)
        if (
            self._grouped
            and rows in STREAM_ROWS
            and self._grouped.linear(x_MD, self._tiles, bias, gate, out_MF)
        ):
            return True
        return rows <= MAX_DECODED and self._multiply(x_MD, bias, gate, out_MF)

    def _multiply(
        self, x_MD: Tensor, bias: Tensor | None, gate: Activation | None, out_MF: Tensor
    ) -> bool:
        """Write x @ weight.T + bias, gated, to `out`, whose rows may have gaps between them.
        Returns whether the kernels can be made."""
        if not len(x_MD):
            return True
        x_MD = x_MD.contiguous()
        task = self._task(self._tiles, out_MF, len(x_MD), x=x_MD, bias=bias)
        task.outputs, task.stride = out_MF.shape[1], out_MF.stride(0)
        task.is_float = out_MF.dtype == torch.float32
        if len(x_MD) <= MAX_FEW:
            return self._few(task, gate)
        return self._many(task, gate, x_MD)

    def _few(self, task: _Task, gate: Activation | None) -> bool:
        tiles = -(-task.outputs // OUTPUTS)
        config = few_config(tiles, gate, self._num_cores)
        kernel = _kernels("tiles_few").get(macros(self._tiles.form, gate, **config))
        if kernel is None:
            return False
        blocks = tiles if gate else -(-tiles // config["TILES"])
        _launch("tiles_few", kernel, blocks, task, config["WARPS"])
        return True

    def _many(self, task: _Task, gate: Activation | None, x_MD: Tensor) -> bool:
        form, rows, inputs = self._tiles.form, task.rows, task.inputs
        config = next(each for each in MANY if rows <= 8 * each["COLUMNS"])
        columns, slots = config["COLUMNS"], config["TILES"] * config["OUT_WARPS"]
        of_block = 8 * columns
        lanes = _kernels("tiles_lanes").get(macros(form, WARPS=WARPS))
        kernel = _kernels("tiles_many").get(macros(form, gate, **config))
        if lanes is None or kernel is None:
            return False
        x = torch.empty((inputs // 32, of_block, 32), dtype=x_MD.dtype, device=x_MD.device)
        groups = inputs // form.group if form.has_step else 0
        sums = torch.empty((groups, of_block), dtype=torch.float32, device=x_MD.device)
        arranging = self._task(self._tiles, x, rows, x=x_MD, partial=sums)
        arranging.outputs = of_block // 8
        units = inputs // 32 * arranging.outputs
        _launch("tiles_lanes", lanes, -(-units // WARPS), arranging, WARPS)

        parts = -(-task.outputs // (slots * OUTPUTS // (2 if gate else 1)))
        most = min(inputs // INPUTS // LEAST_STEPS, MOST_SHARES)
        shares = max(min(config["RESIDENT"] * self._num_cores // parts, most), 1)
        count = shares * parts * of_block * slots * OUTPUTS if shares > 1 else 0
        partial = torch.empty(count, dtype=torch.float32, device=x_MD.device)
        _fill(task, x=x, sums=sums, partial=partial, done=self._done)
        step_bytes = columns * 1024
        if form.has_step:
            step_bytes += columns * (INPUTS // form.group) * 32
        shared_bytes = config["STAGES"] * SETS * step_bytes
        warps = config["OUT_WARPS"] * SETS
        _launch("tiles_many", kernel, parts * shares, task, warps, shared_bytes)
        return True

    def _values(self, tiles: Tiles, ids_T: Tensor | None = None) -> Tensor:
        """Return the values of all outputs of these tiles, or of `ids`."""
        count = tiles.outputs if ids_T is None else len(ids_T)
        out = torch.empty((count, tiles.inputs), dtype=torch.bfloat16, device=tiles.numbers.device)
        units = count // OUTPUTS if ids_T is None else count
        task = self._task(tiles, out, units, ids=ids_T)
        blocks = -(-units * (tiles.inputs // INPUTS) // WARPS)
        if blocks:
            _launch("tiles_dense", self._dense, blocks, task, WARPS)
        return out

    def _task(self, tiles: Tiles, out: Tensor, rows: int, **tensors: Tensor | None) -> _Task:
        task = _Task(rows=rows, inputs=tiles.inputs)
        _fill(task, numbers=tiles.numbers, factors=tiles.factors, scales=tiles.scales, out=out)
        _fill(task, **tensors)
        return task


def _fill(task: _Task, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        setattr(task, name, 0 if tensor is None else tensor.data_ptr())


def _launch(
    name: str, kernel: int, num_blocks: int, task: _Task, warps: int, shared_bytes: int = 0
) -> None:
    _kernels(name).launch(
        kernel, num_blocks, 32 * warps, shared_bytes, ctypes.addressof(task)
    )  # fmt: skip
