"""GEMMs of some rows by weights of GGUF files in tiles on Hopper: the host side of
`csrc/packed_grouped.cu` with `csrc/tile_rows.cuh`.

Each format and activation has a kernel, which NVRTC compiles at its first use, and which is cached
on disk.

Axes: M rows, D inputs, F outputs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl_kernels.grouped import BOX, STEP, beside_bytes, one_stage_bytes
from minisgl_kernels.hopper import Kernels, load_gemm
from minisgl_kernels.stream import MOST_ROWS, Stream
from minisgl_kernels.triton.arrange import arrange
from minisgl_zoo.gguf.tiles import OUTPUTS, TileForm, Tiles

Macros = tuple[tuple[str, int], ...]

INPUTS: Final = 128
"""Of a turn: two steps of each tile."""
GATES: Final = {None: 0, "silu": 1, "gelu_tanh": 2}
"""The macro GATE."""
HEADERS: Final = ("tile_numbers.cuh", "gate.cuh", "grouped_tiles.cuh", "tile_rows.cuh")


def num_stages(form: TileForm) -> int:
    """Return the turns that are fetched ahead: as many as fit into shared memory."""
    return 4 if form.bits <= 4 else 3


def stage_bytes(form: TileForm) -> int:
    """Return the shared memory of all stages."""
    row_bytes, x_bytes = INPUTS * form.bits // 8, MOST_ROWS * INPUTS * 2
    one = one_stage_bytes(row_bytes, x_bytes, BOX // OUTPUTS, *scale_bytes(form))
    return num_stages(form) * one


def scale_bytes(form: TileForm) -> tuple[int, int]:
    """Return the bytes of a tile's factors and of its scales in a turn."""
    return 32 * form.factor_bytes, (32 if form.block == 256 else 64) * form.num_halves


def form_macros(form: TileForm) -> dict[str, int]:
    """Return the macros of tile_numbers.cuh."""
    return {
        "BITS": form.bits, "GROUP": form.group, "BLOCK": form.block, "STEPS": int(form.has_step),
        "MIDDLE": form.middle, "TABLE": int(form.is_table),
    }  # fmt: skip


def macros_of(form: TileForm, gate: Activation | None) -> Macros:
    """Return the macros of a kernel."""
    return tuple({
        **form_macros(form), "GATE": GATES[gate], "GATED": int(gate is not None), "OUTER": 0,
        "PACKED": 0, "TILED": 1, "MOST": MOST_ROWS, "STAGES": num_stages(form),
        "BESIDE": beside_bytes(MOST_ROWS, has_pairs=False), "INPUTS": INPUTS,
        "ROW_BYTES": INPUTS * form.bits // 8, "X_SCALES": 0, "STREAM": 1,
    }.items())  # fmt: skip


def kernel_cubin(macros: Macros) -> bytes:
    """Return the compiled kernel. Raises JitUnavailable."""
    columns = range(STEP, MOST_ROWS + 1, STEP)
    return load_gemm(
        "packed_grouped", torch.bfloat16, columns, dict(macros), HEADERS, from_registers=True
    )


class TileGrouped:
    """The kernels on the current device."""

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        self._kernels = Kernels(
            "grouped_product", kernel_cubin, "weights of GGUF files are dequantised for more rows"
        )
        self._stream = Stream(self._kernels)

    def prepare(self, tiles: Tiles) -> None:
        """Begin to compile the kernels of a matrix, and take memory for the sums that blocks
        exchange."""
        self._stream.take_memory(tiles.numbers.device)
        for gate in (None, "silu"):
            self._kernels.begin_compiling(macros_of(tiles.form, gate))

    def linear(
        self, x_MD: Tensor, tiles: Tiles, bias: Tensor | None, gate: Activation | None,
        out_MF: Tensor,
    ) -> bool:  # fmt: skip
        """Write x @ weight.T + bias, gated, to `out`, whose rows may have gaps between them.
        Returns whether the kernel can be made. The weight must be prepared; its values are rounded
        to bfloat16."""
        kernel = self._kernels.get(macros_of(tiles.form, gate))
        if kernel is None:
            return False
        x_MP = arrange(x_MD, OUTPUTS, 1.0)
        task = self._stream.task(x_MP, out_MF, bias)
        maps = self._weight_maps(tiles)
        self._stream.launch(kernel, maps, task, x_MP, tiles.outputs, stage_bytes(tiles.form))
        return True

    def _weight_maps(self, tiles: Tiles) -> tuple[bytes, ...]:
        """Return the tensor maps of all tiles' numbers, in units of 8 bytes, factors and scales. A
        copy takes the turns of `BOX` outputs."""
        widths = (2 * tiles.numbers.shape[2], *scale_bytes(tiles.form))
        return tuple(
            self._kernels.weight_map(
                x.data_ptr(), len(x), x[0].nbytes // 8, BOX // OUTPUTS, itemsize=8,
                box_columns=width // 8,
            ) if width else bytes(128)
            for x, width in zip((tiles.numbers, tiles.factors, tiles.scales), widths, strict=True)
        )  # fmt: skip
