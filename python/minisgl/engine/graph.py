"""CUDA graphs for decode: a step whose shape was seen before is replayed as one launch.

A graph remembers kernels with their addresses, so a padded step finds its inputs where an earlier
step of its shape found them (`Device.upload`), and works in memory that all graphs share: they
run one after another, and only the ids outlive a step.

Capture is lazy: the first step of a shape runs as it is (which also compiles its kernels), the
second is captured and replayed. Both moments depend on the plans alone, so every rank reaches
them at the same step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.engine.device import Runner
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160, 176, 208, 256)
"""Rows. A padding row costs little where a step takes long. The products of a layer of Qwen3-14B
take 192 us for 128 rows, then 203 (144), 214 (160), 219 (176), 241 (192), 236 (208), 252 (224), 250
(240) and 252 (256): 192, 224 and 240 cost more than a larger size, or as much."""
SIZE_STEP = 64  # of those above


def graph_sizes(max_rows: int) -> list[int]:
    """Padded numbers of rows, ascending, up to and with `max_rows`."""
    sizes = [size for size in SIZES if size < max_rows]
    sizes += range(SIZES[-1] + SIZE_STEP, max_rows, SIZE_STEP)
    return [*sizes, max_rows] if max_rows else []


class GraphRunner(Runner):
    """Mutable: the graphs that it has captured, by shape."""

    def __init__(self, max_rows: int) -> None:
        self._sizes = graph_sizes(max_rows)
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.capture_s = 0.0

    def padded_rows(self, plan: Plan) -> int | None:
        if plan.num_decodes != plan.num_rows or plan.num_rows > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, plan.num_rows)]

    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        if shape is None:
            return compute()
        if shape not in self._seen:
            self._seen.add(shape)
            return compute()
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape, compute)
        graph, ids = self._graphs[shape]
        graph.replay()
        return ids

    def _capture(
        self, shape: Hashable, compute: Callable[[], Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        start = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            ids = compute()
        finally:
            graph.capture_end()
        seconds = time.perf_counter() - start
        self.capture_s += seconds
        logger.debug("captured %s in %.3f s", shape, seconds)
        return graph, ids
