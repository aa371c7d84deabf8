"""Which experts the grouped GEMMs of packed weights take, without a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.hopper_kernels import uncompiled
from minisgl.kernel.ops import Ops
from minisgl.kernel.triton.moe import Gate
from minisgl_kernels import fp8_grouped, packed_grouped
from minisgl_kernels.fp8_grouped import FEWEST_TOKENS, Fp8Grouped
from minisgl_kernels.grouped import MAX_EXPERTS, Task, shared_bytes
from minisgl_kernels.hopper import SHARED_BYTES, Kernels
from minisgl_kernels.packed_grouped import MOST, STAGES, PackedGrouped, stage_bytes, takes
from minisgl_kernels.packed_moe import PackedMoeBackend
from minisgl_kernels.stream import Stream
from minisgl_zoo.weights.quantised import Packed

BITS = {torch.int32: 4, torch.float8_e4m3fn: 8, torch.int8: 8, torch.uint8: 8}


def packed(
    kind: Any, dtype: torch.dtype, inputs: int = 256, experts: int = 4, outputs: int = 64,
    **parts: Any,
) -> Packed:  # fmt: skip
    columns = inputs * BITS[dtype] // (32 if dtype == torch.int32 else 8)
    numbers = torch.empty(experts, outputs, columns, dtype=dtype, device="meta")
    if group := parts.get("group"):
        parts["scale"] = torch.empty(experts, outputs, -(-inputs // group), device="meta")
    return Packed(kind=kind, numbers=numbers, **parts)


@pytest.mark.parametrize(
    ("weight", "is_taken"),
    [
        (packed("int4", torch.int32, group=128, middle=8), True),
        (packed("int4", torch.int32, group=64, middle=8), False),  # its scales are no bfloat16
        (packed("int4", torch.int32, inputs=224, group=128), True),
        (packed("int4", torch.int32, inputs=232, group=128), False),  # rows of 116 bytes
        (packed("fp4", torch.int32, group=32), True),
        (packed("fp4", torch.int32, group=64), False),
        (packed("fp8", torch.float8_e4m3fn), True),
        (packed("fp8", torch.float8_e4m3fn, group=128), True),
        (packed("fp8", torch.float8_e4m3fn, group=32), False),
        (packed("fp8", torch.float8_e4m3fn, experts=MAX_EXPERTS + 1), False),
        (packed("fp8", torch.float8_e4m3fn, outputs=72), False),
        (packed("int8", torch.int8, middle=1), False),
        (packed("uint8", torch.uint8), False),
    ],
)
def test_formats_and_sizes(weight: Packed, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 1024)  # of "meta" it raises
    assert takes(weight) == is_taken


@pytest.mark.parametrize("weight", [packed("int4", torch.int32), packed("int8", torch.int8)])
def test_stages_fit_in_shared_memory(weight: Packed) -> None:
    needed = stage_bytes(weight)
    assert needed // STAGES[weight.is_4_bit] % 1024 == 0  # the swizzle's alignment
    assert shared_bytes(needed, MOST, MAX_EXPERTS) <= SHARED_BYTES


def blocks(**others: Any) -> Packed:
    """Return a stack with a scale for each block of 128 x 128."""
    weight = packed("fp8", torch.float8_e4m3fn, **{"outputs": 256, "group": 128} | others)
    scale = torch.empty(len(weight.numbers), weight.shape[1] // 128, weight.shape[2] // 128)
    return replace(weight, rows=128, scale=scale.to("meta"))


@pytest.mark.parametrize(
    ("weight", "is_taken"),
    [
        (blocks(), True),
        (blocks(experts=MAX_EXPERTS + 1), False),
        (blocks(outputs=192), False),
        (blocks(inputs=192), False),
        (replace(blocks(), rows=1), False),
        (replace(blocks(), outer=torch.ones(4, 256)), False),
        (replace(blocks(), scale=blocks().scale.bfloat16()), False),
        (packed("int8", torch.int8, group=128, rows=128), False),
    ],
)  # fmt: skip
def test_formats_for_fp8_tensor_cores(
    weight: Packed, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 1024)
    gemms = Fp8Grouped.__new__(Fp8Grouped)
    gemms._kernels = Mock(get_all=Mock(return_value=True))
    x = torch.zeros(FEWEST_TOKENS, 256).bfloat16()
    assert gemms.takes(x, weight, blocks(), Gate()) == is_taken
    assert gemms.takes(x, blocks(), weight, Gate()) == is_taken
    assert not gemms.takes(x[1:], weight, blocks(), Gate())
    assert not gemms.takes(x.half(), weight, blocks(), Gate())
    assert not gemms.takes(x, weight, blocks(), Gate(is_squared=True))


def test_stages_of_fp8_fit_in_shared_memory() -> None:
    each = fp8_grouped.STAGE_BYTES // fp8_grouped.STAGES
    assert each % 1024 == 0
    needed = shared_bytes(fp8_grouped.STAGE_BYTES, fp8_grouped.MOST, MAX_EXPERTS)
    assert needed + fp8_grouped.SCALE_BYTES <= SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "tile_rows", "num_blocks"),
    [
        *((1, 16, 50), (17, 32, 50), (128, 128, 50), (129, 80, 100)),
        *((300, 112, 120), (768, 128, 120), (1152, 128, 132)),
    ],
)
def test_how_blocks_share_one_matrix(
    rows: int, tile_rows: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 x 40 parts for each tile of rows; at least four for each block. Each tile has as many
    blocks, if five of six cores then work."""
    tasks: list[Task] = []
    launched: list[int] = []
    maps: list[tuple[int, ...]] = []

    def launch(kernel: int, blocks: int, *others: Any) -> None:
        parameters = ctypes.cast(others[3], ctypes.POINTER(ctypes.c_int64 * 2)).contents
        tasks.append(Task.from_buffer_copy(ctypes.string_at(parameters[1], ctypes.sizeof(Task))))
        launched.append(blocks)
        assert others[1] <= SHARED_BYTES

    def tensor_map(*numbers: int) -> bytes:
        maps.append(numbers[1:])
        return bytes(128)

    grouped = PackedGrouped.__new__(PackedGrouped)
    grouped._kernels = uncompiled("", Mock(kernel_launch=launch, tensor_map=tensor_map))
    grouped._stream = Stream(grouped._kernels)
    monkeypatch.setattr(Kernels, "make", lambda self, kind: 7)
    monkeypatch.setattr(Kernels, "begin_compiling", Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", Mock(return_value=Mock(cuda_stream=0)))
    monkeypatch.setattr(
        packed_grouped, "arrange", lambda x, turn, unit: F.pad(x, (0, -x.shape[1] % 128))
    )
    numbers = torch.zeros(1152, 632, dtype=torch.int32)  # 5,056 inputs
    scale = torch.ones(1152, 79, dtype=torch.bfloat16)
    stack = grouped.prepare(Packed(kind="int4", numbers=numbers, group=64, scale=scale, middle=8))
    assert stack is not None
    y = grouped.linear(torch.zeros(rows, 5056).bfloat16(), stack, None, "silu")
    assert y is not None
    assert y.shape == (rows, 576)
    (task,) = tasks
    assert launched == [num_blocks]
    numbers_map, x_map = (1152, 2528, 128, 1, 64), (rows, 5120, tile_rows, 2, 64)
    assert sorted(maps) == sorted([numbers_map, x_map, (79, 1152, 2, 2, 128)])
    assert (task.stride, task.share, task.inputs, task.outputs) == (rows, tile_rows, 5120, 576)
    assert (task.x, task.counts, task.rows, task.scales) == (0, 0, 0, 0)


def test_experts_of_a_step_that_samples_nothing() -> None:
    backend = PackedMoeBackend(Ops(), None, None)
    x_TD, weights_TK = torch.zeros(0, 128), torch.zeros(0, 2)
    got = backend.routed(x_TD, weights_TK, torch.zeros(0, 2, dtype=torch.int32), Mock())
    assert got.shape == (0, 128)
