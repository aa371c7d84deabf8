"""What the GEMM of GGUF's tiles is told on Hopper, without a GPU."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

import torch.nn.functional as F

from helpers.gguf_blocks import draw
from helpers.hopper_kernels import uncompiled
from minisgl_kernels import tile_grouped
from minisgl_kernels.grouped import Task
from minisgl_kernels.hopper import SHARED_BYTES, Kernels
from minisgl_kernels.stream import Stream
from minisgl_kernels.tile_grouped import TileGrouped
from minisgl_zoo.gguf.tiles import TILE_FORMS, pack_tiles


@pytest.mark.parametrize("kind", TILE_FORMS)
def test_tasks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Task] = []
    maps: list[tuple[int, ...]] = []

    def launch(kernel: int, blocks: int, *others: Any) -> None:
        parameters = ctypes.cast(others[3], ctypes.POINTER(ctypes.c_int64 * 2)).contents
        tasks.append(Task.from_buffer_copy(ctypes.string_at(parameters[1], ctypes.sizeof(Task))))
        assert blocks == 2 * 12 // 4  # two tiles of rows, twelve parts, at least four of a block
        assert others[1] <= SHARED_BYTES

    def tensor_map(*numbers: int) -> bytes:
        maps.append(numbers)
        return bytes(128)

    grouped = TileGrouped.__new__(TileGrouped)
    grouped._kernels = uncompiled("", Mock(kernel_launch=launch, tensor_map=tensor_map))
    grouped._stream = Stream(grouped._kernels)
    monkeypatch.setattr(Kernels, "make", lambda self, kind: 7)
    monkeypatch.setattr(Kernels, "begin_compiling", Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", Mock(return_value=Mock(cuda_stream=0)))
    monkeypatch.setattr(
        tile_grouped, "arrange", lambda x, turn, unit: F.pad(x, (0, -len(x[0]) % 128))
    )
    form = TILE_FORMS[kind]
    inputs = 1536 if form.block == 256 else 1472  # 24 or 23 steps
    tiles = pack_tiles(kind, draw(kind, 1, (208, inputs))[0])
    grouped.prepare(tiles)
    out = torch.zeros(130, 240).bfloat16()
    assert grouped.linear(torch.zeros(130, inputs).bfloat16(), tiles, None, None, out[:, :208])
    (task,) = tasks
    tile_bytes = 128 * form.bits
    assert maps[0] == (
        tiles.numbers.data_ptr(),
        13,
        inputs // 64 * tile_bytes // 8,
        8,
        8,
        tile_bytes // 4,
    )
    steps = inputs // 64
    if form.factor_bytes:
        width = 16 * form.factor_bytes  # of a step
        want = (tiles.factors.data_ptr(), 13, steps * width // 8, 8, 8, 2 * width // 8)
        assert maps.pop(1) == want
    per_turn, blocks = (1, steps // 4) if form.block == 256 else (2, steps)
    width = 32 * form.num_halves
    want = (tiles.scales.data_ptr(), 13, blocks * width // 8, 8, 8, per_turn * width // 8)
    assert maps[1] == want
    assert maps[2][1:] == (130, 1536, 80, 2, 64)
    assert (task.stride, task.share, task.inputs) == (130, 80, 1536)
    assert (task.outputs, task.width) == (208, 240)
