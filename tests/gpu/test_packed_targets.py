"""The kernels of packed weights compile for GPUs that are not here, and fit their shared memory.

As `test_gpu_targets`, with no engine. fp8 needs compute capability 8.9.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.gpu_targets import TARGETS, compiled_bytes, shared_bytes_of, type_of

pytest.importorskip("triton", reason="a CPU build of torch brings none")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_packed_weights_compile_and_fit(target: int, tmp_path: Path) -> None:
    shared_bytes = shared_bytes_of(__file__, target, tmp_path)
    assert {"_row", "_packed_gemm", "_dense", "_up", "_down", "_activate"} <= set(shared_bytes)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forms(*shape: int) -> Iterator[Any]:
    """A packed weight of each kind."""
    from minisgl_zoo.weights.quantised import Packed

    *rows, inputs = shape
    outer = empty(*rows, dtype=torch.float32)
    fp8 = empty(*shape, dtype=torch.float8_e4m3fn)
    words = empty(*rows, inputs // 8, dtype=torch.int32)
    yield Packed(kind="fp8", numbers=fp8, outer=outer)
    blocks = (*rows[:-1], rows[-1] // 128, inputs // 128)
    scale = empty(*blocks, dtype=torch.float32)
    yield Packed(kind="fp8", numbers=fp8, group=128, rows=128, scale=scale)
    yield Packed(kind="int8", numbers=empty(*shape, dtype=torch.int8), outer=outer)
    bytes_, zeros = empty(*shape, dtype=torch.uint8), empty(*rows, inputs // 64, dtype=torch.uint8)
    scale = empty(*rows, inputs // 64)
    yield Packed(kind="uint8", numbers=bytes_, group=64, scale=scale, zero=zeros)
    yield Packed(kind="int4", numbers=words, group=128, scale=empty(*rows, inputs // 128), middle=8)
    scale = empty(*rows, inputs // 32, dtype=torch.uint8)
    yield Packed(kind="fp4", numbers=words, group=32, scale=scale)
    scale = empty(*rows, inputs // 16, dtype=torch.float8_e4m3fn)
    yield Packed(kind="fp4", numbers=words, group=16, scale=scale, outer=outer)


def main(target: int) -> None:
    """Print the shared memory of each kernel, the most of its forms."""
    from minisgl.kernel.triton import launch
    from minisgl.kernel.triton.moe import Gate
    from minisgl_kernels.triton import fp8, packed_gemm, packed_gemv
    from minisgl_kernels.triton.moe_gate import activate_pairs
    from minisgl_kernels.triton.packed import dense
    from minisgl_kernels.triton.packed_gemm import TileConfig

    has_pdl = target >= 90
    launched: list[tuple[Any, ...]] = []

    def note(
        launcher: Any, grid: object, args: Any, constants: Any, *, dtype: object,
        num_warps: int, num_stages: int = 3,
    ) -> None:  # fmt: skip
        types = tuple(map(type_of, args))
        launched.append((launcher._kernel, types, (*constants, has_pdl), num_warps, num_stages))

    patched: tuple[tuple[Any, str, Any], ...] = ((launch.Launcher, "__call__", note),)
    for owner, name, value in patched:  # for as long as the process lives
        setattr(owner, name, value)
    counts, ids = empty(8, dtype=torch.int32), empty(2, 4, dtype=torch.int32)
    for up, down in zip(forms(8, 1536, 2048), forms(8, 2048, 1024), strict=True):
        k = up.group if 32 <= up.group <= 128 else 128
        packed_gemv.experts_of_few(empty(2, 2048), up, down, empty(2, 4), ids, 0)
        packed_gemm.expert_gemm(
            empty(100, 2048), up, counts, empty(8, 100, dtype=torch.int32), None, empty(400, 1536),
            TileConfig(m=64, n=64, k=k),
        )  # fmt: skip
    biases, pairs = empty(8, 1536), empty(100, 4, dtype=torch.int32)
    for gate in (Gate(), Gate(alpha=1.702, limit=7.0)):
        activate_pairs(
            empty(400, 1536), pairs, range(8), empty(400, 768), gate=gate, bias_LG=biases
        )
    for one in forms(1536, 2048):
        packed_gemv.norm_linear(empty(1, 2048), None, empty(2048), 1e-6, one, None, "silu")
        dense(one, torch.bfloat16)
    fp8.quantise(empty(100, 2048), 128)
    shared_bytes: Counter[str] = Counter()
    for kernel, types, constants, num_warps, num_stages in launched:
        if target < 89 and any("fp8" in kind for kind in types):
            continue
        size = compiled_bytes(kernel, target, types, constants, num_warps, num_stages)
        name = kernel.__name__
        shared_bytes[name] = max(shared_bytes[name], size)
    print(json.dumps(shared_bytes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
