"""Products of up to 64 rows on Hopper: what the host knows of `csrc/cuda/thin.cu`.

How a product is cut is decided by the shape of its weights and the device, by a model of its time.
So a row comes out the same however many of those that come here there are, and few kernels are
compiled: by NVRTC, at their first use, and cached on disk.

Axes: M rows, D inputs, F outputs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from minisgl.kernel.hopper import INPUTS, SHARED_BYTES, TYPES, Kernels, load_product

MAX_ROWS = 64
SMALL, LARGE = 16 << 20, 60 << 20
"""Numbers in a product's weights; between the two cuBLAS is better. With 64 rows the products of a
layer of Qwen3-0.6B, all small, took 22.9 us instead of 33.6 with cuBLAS, those of 14B, of which
gate and up and down are large, 178 instead of 198. With 128 to 192 rows neither gained anything."""
LEFT_BYTES = 16 << 10  # of it, for the kernel before, during which weights are fetched
NUM_THREADS = 288  # two warpgroups and a warp
MAX_SPLIT = 8  # blocks of a cluster, on every GPU that has clusters


class _Product(ctypes.Structure):
    """struct Product: addresses of the outputs and the bias or 0, rows, outputs."""

    _fields_ = (
        ("out", ctypes.c_int64),
        ("bias", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """How a product is cut; see thin.cu.

    columns: N of its matrix instructions. split: parts of the inputs.
    """

    columns: int
    split: int
    gated: bool
    halves: bool

    @property
    def width(self) -> int:
        """Rows of the weights that a block has."""
        return self.columns * (2 if self.halves else 1)

    @property
    def outputs(self) -> int:
        """Of a block."""
        return self.width // 2 if self.gated else self.width

    def num_blocks(self, outputs: int) -> int:
        return -(-outputs // self.outputs) * self.split

    def num_turns(self, inputs: int) -> int:
        """Of the block that has most."""
        return -(-inputs // INPUTS // self.split)

    def stage_bytes(self, rows: int) -> int:
        return (_in_8s(rows) + self.width) * INPUTS * 2

    def stages(self, rows: int, inputs: int) -> int:
        """Turns for which there is room and use. Even where warpgroups multiply turn about: then a
        stage is always the same warpgroup's. Whoever waits for a turn cannot tell it from the one
        two rounds before in the same stage, which a warpgroup that skipped a round could meet."""
        room = SHARED_BYTES - LEFT_BYTES - 1040 - self._beyond_bytes(rows) - self._sums_bytes()
        room //= self.stage_bytes(rows) + 16
        turns = self.num_turns(inputs)
        if self.halves:
            return min(room, turns)
        return max(min(room - room % 2, turns + turns % 2), 2)

    def shared_bytes(self, rows: int, inputs: int) -> int:
        """Stages with two barriers each, or in their place sums on their way between warpgroups;
        then sums from other blocks."""
        ring = self.stages(rows, inputs) * (self.stage_bytes(rows) + 16) + self._beyond_bytes(rows)
        between_groups = self.columns * 256
        return max(ring, between_groups) + self._sums_bytes() + 1040  # to align them

    def _sums_bytes(self) -> int:
        """Of what the other blocks of a cluster send to one."""
        chunks = self.columns // 8
        pairs = chunks // 2 if self.gated and not self.halves else chunks
        owned = -(-pairs // self.split) * (chunks // pairs)
        return (self.split - 1) * owned * 2048

    def _beyond_bytes(self, rows: int) -> int:
        """What the last stage's matrix instructions read where weights do not fill their tiles."""
        return max(MAX_ROWS * INPUTS * 2 - self.stage_bytes(rows), 0)


@lru_cache(maxsize=256)
def choose_form(outputs: int, inputs: int, gated: bool, max_blocks: tuple[int, ...]) -> Form | None:
    """The form that should be fastest, or None where this kernel is not for such a product.

    outputs: what comes out, so that a gated product has weights for twice as many. max_blocks: that
    the device runs at once in clusters of 1, 2, ...
    """
    numbers = outputs * inputs * (2 if gated else 1)
    if inputs % INPUTS or outputs % 8 or SMALL < numbers < LARGE:
        return None
    forms = [
        Form(columns, split, gated, halves=False)
        for columns in range(16, 257, 16)
        for split in range(1, MAX_SPLIT + 1)
        if split * INPUTS <= inputs
    ]
    if gated:
        forms += [Form(columns, 1, gated, halves=True) for columns in range(16, 257, 8)]
    possible = [
        form
        for form in forms
        if form.num_blocks(outputs) <= max_blocks[form.split - 1]
        and form.shared_bytes(MAX_ROWS, inputs) <= SHARED_BYTES
    ]
    return min(possible, key=lambda form: _seconds(form, outputs, inputs), default=None)


def _seconds(form: Form, outputs: int, inputs: int) -> float:
    """A model of the time of 64 rows; its constants were fitted to measurements on an H200."""
    numbers = outputs * inputs * (2 if form.gated else 1)
    turn = max(
        form.stage_bytes(MAX_ROWS) / 80e9,  # into a multiprocessor
        2 * form.width * INPUTS * MAX_ROWS / 4.5e12,  # its arithmetic
        0.3e-6 if form.halves else 0.15e-6,  # from a barrier to the next
    )
    from_memory = numbers * 2 / min(4.1e12, 36e9 * form.num_blocks(outputs))
    seconds = 2e-6 + max(form.num_turns(inputs) * turn, from_memory)
    if form.split > 1:
        sent = (form.split - 1) / form.split * form.width * MAX_ROWS * 4
        seconds += 0.5e-6 + sent / 10e9  # from block to block
    return seconds


def kernel_cubin(kind: tuple[Form, torch.dtype]) -> bytes:
    """Raises JitUnavailable."""
    form, dtype = kind
    numbers = {
        "N": form.columns,
        "SPLIT": form.split,
        "GATED": form.gated,
        "HALVES": form.halves,
    }
    return load_product("thin", dtype, (form.columns,), numbers)


class ThinProducts:
    """The kernels on the current device.

    Weights are fetched while the kernel before still runs: they must have been written before it.
    """

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        self._kernels = Kernels(
            "thin_product", kernel_cubin, "some products of few rows are cuBLAS's"
        )
        probe = self._kernels.make((Form(64, 1, gated=False, halves=False), torch.bfloat16))
        self._max_blocks = tuple(
            size * self._kernels.library.kernel_clusters(probe, NUM_THREADS, SHARED_BYTES, size)
            for size in range(1, MAX_SPLIT + 1)
        )

    def form(self, x: Tensor, weight: Tensor, *, gated: bool = False) -> Form | None:
        """How to compute a product; None where cuBLAS should. `linear` takes the same arguments."""
        if x.dim() != 2 or not 0 < len(x) <= MAX_ROWS:
            return None
        if x.dtype not in TYPES or weight.dtype != x.dtype or weight.shape[1] != x.shape[1]:
            return None
        if not (x.is_contiguous() and weight.is_contiguous()):
            return None
        if x.data_ptr() % 16 or weight.data_ptr() % 16:
            return None
        outputs = len(weight) // (2 if gated else 1)
        form = choose_form(outputs, x.shape[1], gated, self._max_blocks)
        return form if form and self._kernels.get((form, x.dtype)) else None

    def linear(self, x_MD: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
        """See `Ops.linear`; with a gated form, silu(gate) * up of what comes out there."""
        assert bias is None or bias.dtype == x_MD.dtype
        rows, inputs = x_MD.shape
        outputs = len(weight) // (2 if form.gated else 1)
        out_MF = torch.empty((rows, outputs), dtype=x_MD.dtype, device=x_MD.device)
        library = self._kernels.library
        weight_map = self._kernels.weight_map(
            weight.data_ptr(), len(weight), inputs, form.width // 2
        )
        x_map = bytes(library.tensor_map(x_MD.data_ptr(), rows, inputs, _in_8s(rows)))
        maps = ctypes.create_string_buffer(x_map + weight_map, 256)
        address = 0 if bias is None else bias.data_ptr()
        product = _Product(out_MF.data_ptr(), address, rows, outputs)
        numbers = (ctypes.c_int32 * 2)(inputs, form.stages(rows, inputs))
        at, of = ctypes.addressof(maps), ctypes.addressof(numbers)
        parameters = (ctypes.c_int64 * 5)(at, at + 128, ctypes.addressof(product), of, of + 4)
        library.kernel_launch(
            self._kernels.get((form, x_MD.dtype)), form.num_blocks(outputs), NUM_THREADS,
            form.shared_bytes(rows, inputs), form.split,
            ctypes.addressof(parameters), True, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        return out_MF


def _in_8s(rows: int) -> int:
    """Rows in shared memory, whose swizzle repeats after 8."""
    return -(-rows // 8) * 8
