"""Skinny GEMMs, of up to 64 rows, on Hopper: the host side of `csrc/skinny.cu`.

A model of a GEMM's time chooses its kernel config from the shape of the weights and the device. It
does not use the number of rows, so a row has the same result in every batch, and few kernels are
compiled. NVRTC compiles a kernel when it is first used; the result is cached on disk.

Axes: M rows, D inputs, F outputs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from minisgl_kernels.hopper import INPUTS, SHARED_BYTES, TYPES, Kernels, load_gemm

MAX_ROWS = 64
SMALL, LARGE = 16 << 20, 60 << 20
"""Numbers of weights between which cuBLAS is faster. With 64 rows, the GEMMs of a layer of
Qwen3-0.6B, all below SMALL, took 22.9 us instead of 33.6 with cuBLAS. Those of 14B, of which
gate-up and down are above LARGE, took 178 instead of 198. With 128 to 192 rows neither gained
anything."""
LEFT_BYTES = 16 << 10  # shared memory for the kernel before this one, while weights are fetched
NUM_THREADS = 288  # two warpgroups and a warp
MAX_SPLIT = 8  # blocks that a cluster may have on every GPU with clusters


class _Product(ctypes.Structure):
    """struct Product: the addresses of the outputs and of the bias (or 0); the number of rows, and
    of outputs."""

    _fields_ = (
        ("out", ctypes.c_int64),
        ("bias", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The kernel config of a GEMM; see skinny.cu.

    columns: N of its matrix instructions. split: the number of blocks that split a tile's inputs.
    wide: the outputs are float32.
    """

    columns: int
    split: int
    gated: bool
    halves: bool
    wide: bool = False

    @property
    def width(self) -> int:
        """Rows of the weights per block."""
        return self.columns * (2 if self.halves else 1)

    @property
    def outputs(self) -> int:
        """Outputs per block."""
        return self.width // 2 if self.gated else self.width

    def num_blocks(self, outputs: int) -> int:
        return -(-outputs // self.outputs) * self.split

    def num_turns(self, inputs: int) -> int:
        """The iterations of the block that has the most."""
        return -(-inputs // INPUTS // self.split)

    def stage_bytes(self, rows: int) -> int:
        return (_in_8s(rows) + self.width) * INPUTS * 2

    def stages(self, rows: int, inputs: int) -> int:
        """Return the number of pipeline stages that fit and are used.

        If warpgroups take turns, the number is even, so that a stage always belongs to the same
        warpgroup. Otherwise a warpgroup could skip a round of a stage, and a barrier cannot tell an
        iteration from the one two rounds before.
        """
        room = SHARED_BYTES - LEFT_BYTES - 1040 - self._beyond_bytes(rows) - self._sums_bytes()
        room //= self.stage_bytes(rows) + 16
        turns = self.num_turns(inputs)
        if self.halves:
            return min(room, turns)
        return max(min(room - room % 2, turns + turns % 2), 2)

    def shared_bytes(self, rows: int, inputs: int) -> int:
        """Return the bytes of shared memory: the stages, with two barriers each (the sums between
        warpgroups use their memory later), and the sums from other blocks."""
        ring = self.stages(rows, inputs) * (self.stage_bytes(rows) + 16) + self._beyond_bytes(rows)
        between_groups = self.columns * 256
        return max(ring, between_groups) + self._sums_bytes() + 1040  # to align them

    def _sums_bytes(self) -> int:
        """The bytes that a block gets from the other blocks of its cluster."""
        chunks = self.columns // 8
        pairs = chunks // 2 if self.gated and not self.halves else chunks
        owned = -(-pairs // self.split) * (chunks // pairs)
        return (self.split - 1) * owned * 2048

    def _beyond_bytes(self, rows: int) -> int:
        """The bytes that matrix instructions read beyond the last stage if a tile is not full."""
        return max(MAX_ROWS * INPUTS * 2 - self.stage_bytes(rows), 0)


@lru_cache(maxsize=256)
def choose_config(
    outputs: int, inputs: int, gated: bool, max_blocks: tuple[int, ...]
) -> GemmConfig | None:
    """Return the fastest config by the model. None if cuBLAS is faster or the shape does not fit.

    outputs: of the GEMM; a gated one has twice as many rows of weights. max_blocks: how many blocks
    the device can run at once, in clusters of 1, 2, ...
    """
    numbers = outputs * inputs * (2 if gated else 1)
    if inputs % INPUTS or outputs % 8 or SMALL < numbers < LARGE:
        return None
    configs = [
        GemmConfig(columns, split, gated, halves=False)
        for columns in range(16, 257, 16)
        for split in range(1, MAX_SPLIT + 1)
        if split * INPUTS <= inputs
    ]
    if gated:
        configs += [GemmConfig(columns, 1, gated, halves=True) for columns in range(16, 257, 8)]
    possible = [
        config
        for config in configs
        if config.num_blocks(outputs) <= max_blocks[config.split - 1]
        and config.shared_bytes(MAX_ROWS, inputs) <= SHARED_BYTES
    ]
    return min(possible, key=lambda config: _seconds(config, outputs, inputs), default=None)


def _seconds(config: GemmConfig, outputs: int, inputs: int) -> float:
    """Return the time of a GEMM of 64 rows by the model, whose constants are fitted to an H200."""
    numbers = outputs * inputs * (2 if config.gated else 1)
    turn = max(
        config.stage_bytes(MAX_ROWS) / 80e9,  # into a multiprocessor
        2 * config.width * INPUTS * MAX_ROWS / 4.5e12,  # its arithmetic
        0.3e-6 if config.halves else 0.15e-6,  # from a barrier to the next
    )
    from_memory = numbers * 2 / min(4.1e12, 36e9 * config.num_blocks(outputs))
    seconds = 2e-6 + max(config.num_turns(inputs) * turn, from_memory)
    if config.split > 1:
        sent = (config.split - 1) / config.split * config.width * MAX_ROWS * 4
        seconds += 0.5e-6 + sent / 10e9  # from block to block
    return seconds


def kernel_cubin(kind: tuple[GemmConfig, torch.dtype]) -> bytes:
    """Return the compiled kernel. Raises JitUnavailable."""
    config, dtype = kind
    numbers = {
        "N": config.columns,
        "SPLIT": config.split,
        "GATED": config.gated,
        "HALVES": config.halves,
        "WIDE": config.wide,
    }
    return load_gemm("skinny", dtype, (config.columns,), numbers)


class SkinnyGemms:
    """The kernels on the current device.

    A kernel fetches its weights while the kernel before it still runs. That one must not write
    them.
    """

    def __init__(self) -> None:
        """Raises JitUnavailable if nothing can be compiled, RuntimeError without a device."""
        instead = "cuBLAS computes some GEMMs of few rows"
        self._kernels = Kernels("skinny_gemm", kernel_cubin, instead)
        probe = self._kernels.make((GemmConfig(64, 1, gated=False, halves=False), torch.bfloat16))
        self._max_blocks = tuple(
            size * self._kernels.library.kernel_clusters(probe, NUM_THREADS, SHARED_BYTES, size)
            for size in range(1, MAX_SPLIT + 1)
        )

    def config(
        self, x: Tensor, weight: Tensor, *, gated: bool = False, wide: bool = False
    ) -> GemmConfig | None:
        """Return the config for `linear` with these arguments; None if cuBLAS should compute it."""
        if x.dim() != 2 or not 0 < len(x) <= MAX_ROWS:
            return None
        if x.dtype not in TYPES or weight.dtype != x.dtype or weight.shape[1] != x.shape[1]:
            return None
        if not (x.is_contiguous() and weight.is_contiguous()):
            return None
        if x.data_ptr() % 16 or weight.data_ptr() % 16:
            return None
        outputs = len(weight) // (2 if gated else 1)
        config = choose_config(outputs, x.shape[1], gated, self._max_blocks)
        if config and wide:
            config = replace(config, wide=True)
        return config if config and self._kernels.get((config, x.dtype)) else None

    def linear(
        self, x_MD: Tensor, weight: Tensor, bias: Tensor | None, config: GemmConfig
    ) -> Tensor:
        """See `Ops.linear`. With a gated config, return silu(gate) * up of its result. With a wide
        config, the result is float32."""
        assert bias is None or bias.dtype == x_MD.dtype
        rows, inputs = x_MD.shape
        outputs = len(weight) // (2 if config.gated else 1)
        dtype = torch.float32 if config.wide else x_MD.dtype
        out_MF = torch.empty((rows, outputs), dtype=dtype, device=x_MD.device)
        library = self._kernels.library
        weight_map = self._kernels.weight_map(
            weight.data_ptr(), len(weight), inputs, config.width // 2
        )
        x_map = bytes(library.tensor_map(x_MD.data_ptr(), rows, inputs, _in_8s(rows), 2, INPUTS))
        maps = ctypes.create_string_buffer(x_map + weight_map, 256)
        address = 0 if bias is None else bias.data_ptr()
        product = _Product(out_MF.data_ptr(), address, rows, outputs)
        numbers = (ctypes.c_int32 * 2)(inputs, config.stages(rows, inputs))
        at, of = ctypes.addressof(maps), ctypes.addressof(numbers)
        self._kernels.launch(
            self._kernels.get((config, x_MD.dtype)), config.num_blocks(outputs), NUM_THREADS,
            config.shared_bytes(rows, inputs), at, at + 128, ctypes.addressof(product), of, of + 4,
            cluster=config.split,
        )  # fmt: skip
        return out_MF


def _in_8s(rows: int) -> int:
    """Return the rows in shared memory: a multiple of 8, after which its swizzle repeats."""
    return -(-rows // 8) * 8
