"""Tunes the tiles of `minisgl.moe.fused`: times candidates and keeps the fastest.

Several processes first compile the candidates by launching them on empty inputs, which fills
Triton's cache on disk. Then they are timed one by one. Both GEMMs of a layer use tiles of the same
number of pairs, so each number is judged by the sum of the two best times.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.triton import moe, moe_route
from minisgl.kernel.triton.moe import Tile
from minisgl.moe import Experts
from minisgl_bench.studies.moe_layers import SHAPES, Shape, gpu_layers, graph_s, make_inputs

# (outputs, inputs, warps, stages) of a tile; with gate and up it has twice the columns.
_STREAM = (
    *itertools.product((32, 64), (128,), (4,), (3, 4)),
    *((16, 256, 4, 4), (32, 256, 4, 3), (32, 128, 4, 6), (64, 64, 4, 5), (64, 256, 8, 3)),
    *((64, 128, 8, 4), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3)),
)
_COMPUTE = (
    *itertools.product((64, 128), (64,), (4, 8), (3, 4)),
    *((64, 128, 4, 3), (64, 128, 8, 3), (128, 32, 8, 5), (128, 128, 8, 2)),
    *((256, 64, 8, 3), (256, 64, 8, 4)),
)
CANDIDATES = {16: _STREAM, 32: _STREAM, 64: _COMPUTE, 128: _COMPUTE}
SHARED_MEMORY = 227 << 10  # bytes of shared memory of a program, on an H200
MOST_SUMS = 128  # float32 sums of a thread; more are spilled to memory


def tiles(m: int, gated: bool) -> list[Tile]:
    found = []
    for n, k, warps, stages in CANDIDATES[m]:
        width = n * (1 + gated)
        fits = (m + width) * k * 2 * stages <= SHARED_MEMORY
        if fits and m * width <= MOST_SUMS * 32 * warps:
            found.append(Tile(m=m, n=n, k=k, warps=warps, stages=stages))
    return found


def worth_a_try(mean: float) -> list[int]:
    """Return the numbers of pairs of a tile to try if an expert gets `mean` pairs on average."""
    return [m for m in CANDIDATES if mean / 8 <= m <= max(16, 2.5 * mean)] or [128]


def tune(shapes: dict[str, Shape], counts: Sequence[int], path: Path) -> None:
    """Time every candidate for every shape at each number of tokens; the fastest go to `path`."""
    _compile_all(shapes)
    table = json.loads(path.read_text()) if path.exists() else {}
    device = table.setdefault(torch.cuda.get_device_name(), {})
    for name, shape in shapes.items():
        layers = gpu_layers(shape)
        rows: list[list[Any]] = []
        for tokens in counts:
            seconds, tiles_of = _best(shape, layers, tokens)
            mean = tokens * shape.top_k / shape.experts
            cut = [[x.n, x.k, x.warps, x.stages] for x in tiles_of]
            print(f"{name:<22}{tokens:>6} tokens {seconds * 1e6:>9.1f} us  m {tiles_of[0].m} {cut}")
            row = [mean, tiles_of[0].m, *cut]
            if rows and rows[-1][1:] == row[1:]:
                rows.pop()  # also the tiles for more tokens
            rows.append(row)
        device[f"{shape.hidden}x{shape.inner}"] = rows
        path.write_text(_lines(table))
        del layers
        torch.cuda.empty_cache()


def _best(shape: Shape, layers: list[Experts], tokens: int) -> tuple[float, list[Tile]]:
    """Return the seconds of both GEMMs, and their tiles."""
    steps = []
    for experts in layers:
        x, logits = make_inputs(shape, tokens, torch.device("cuda"), torch.bfloat16)
        counts = torch.empty(shape.experts, dtype=torch.int32, device="cuda")
        weights, ids = moe_route.route(logits, shape.top_k, True, counts)
        steps.append((x, experts, counts, moe.place(ids, counts, 0), weights))
    pairs = tokens * shape.top_k
    act = torch.empty(pairs, shape.inner, dtype=torch.bfloat16, device="cuda").normal_()
    partial = torch.empty(pairs, shape.hidden, dtype=torch.bfloat16, device="cuda")

    def time_s(tile: Tile, gated: bool) -> float:
        def run() -> None:
            for x, experts, counts, rows, weights in steps:
                if gated:
                    moe.grouped_gemm(x, experts.gate_up_LGD, counts, rows, None, act, tile)
                else:
                    moe.grouped_gemm(act, experts.down_LDF, counts, rows, weights, partial, tile)

        return graph_s(run, budget_s=0.02) / len(steps)

    best: tuple[float, list[Tile]] | None = None
    for m in worth_a_try(tokens * shape.top_k / shape.experts):
        chosen = [min((time_s(x, gated), i, x) for i, x in enumerate(tiles(m, gated)))
                  for gated in (True, False)]  # fmt: skip
        seconds = sum(item[0] for item in chosen)
        if best is None or seconds < best[0]:
            best = seconds, [item[2] for item in chosen]
    assert best is not None
    return best


def _compile_all(shapes: dict[str, Shape]) -> None:
    parts = max((os.cpu_count() or 2) - 1, 1)
    module = "minisgl_bench.studies.moe_tiles"
    code = f"import sys; from {module} import compile_part; compile_part(sys.argv)"
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(part), str(parts), *shapes])
        for part in range(parts)
    ]
    for worker in workers:
        worker.wait()


def compile_part(arguments: list[str]) -> None:
    """Compile one process's share of the candidates.

    arguments: (program, part, number of parts, names of shapes).
    """
    part, parts = int(arguments[1]), int(arguments[2])
    jobs = [
        (shape, gated, tile)
        for shape in (SHAPES[name] for name in arguments[3:])
        for gated in (True, False)
        for m in CANDIDATES
        for tile in tiles(m, gated)
    ]

    def blank(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(size, dtype=dtype, device="cuda")

    for shape, gated, tile in jobs[part::parts]:
        counts = blank(shape.experts, dtype=torch.int32)  # nothing to do
        rows = blank(shape.experts, 1, dtype=torch.int32)
        x, wide = blank(1, shape.hidden), blank(shape.top_k, shape.hidden)
        narrow = blank(shape.top_k, shape.inner)
        if gated:
            moe.grouped_gemm(x, wide, counts, rows, None, narrow, tile)
        else:
            moe.grouped_gemm(narrow, wide, counts, rows, wide.float(), wide, tile)


def _lines(table: dict[str, Any]) -> str:
    """Return the table as JSON with a line for each row."""
    devices = []
    for device, sizes in table.items():
        of_sizes = []
        for size, rows in sizes.items():
            lines = ",\n".join(f"      {json.dumps(row)}" for row in rows)
            of_sizes.append(f'    "{size}": [\n{lines}\n    ]')
        devices.append(f'  "{device}": {{\n' + ",\n".join(of_sizes) + "\n  }")
    return "{\n" + ",\n".join(devices) + "\n}\n"
