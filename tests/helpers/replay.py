"""An engine that replays padded steps on a CPU, as a GPU replays graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from minisgl.attention import AttnLayer, BaseAttnMetadata
from minisgl.attention.torch_backend import TorchAttnBackend, _attend
from minisgl.core import Plan, PoolBatch
from minisgl.engine import connect as connect_module
from minisgl.engine import contexts
from minisgl.engine.cpu import CpuDevice
from minisgl.engine.graph import GraphRunner
from minisgl.kernel.ops import Ops


class RowsBackend(TorchAttnBackend):
    """Reads the rows from the place where a graph's kernels read them."""

    graph_safe = True
    prompts_graph_safe = True

    def prepare(self, plan: Plan) -> Any:
        return BaseAttnMetadata()

    def prepare_any(self, num_rows: int, num_tokens: int, longest: int) -> BaseAttnMetadata:
        return BaseAttnMetadata()

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        assert batch.rows is not None
        pool = batch.context.kv_pool.layer(layer.layer_id)
        self.ops.store_kv(k_TKH, v_TKH, batch.slots, pool)
        out_TNH = torch.zeros_like(q_TNH)
        for table_idx, first, length, end in batch.rows.T.tolist():
            if not length:
                continue
            pages = batch.context.page_table[table_idx, : -(-end // pool.k.shape[1])]
            k_CKH, v_CKH = (x[pages].flatten(0, 1)[:end] for x in (pool.k, pool.v))
            span = slice(first, first + length)
            out_TNH[span] = _attend(q_TNH[span], k_CKH, v_CKH, end - length, 0, layer)
        return out_TNH


class ReplayRunner(GraphRunner):
    """Keeps the first step of each shape, and repeats it for later ones."""

    def __init__(self, max_rows: int, max_prompt_tokens: int) -> None:
        super().__init__(max_rows, max_prompt_tokens)
        self.captured: dict[Hashable, Callable[[], Tensor]] = {}
        self.max_tokens = self.prompt_sizes[-1] + self.beside_prompts[-1]

    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        return compute() if shape is None else self.captured.setdefault(shape, compute)()


class ReplayDevice(CpuDevice):
    """Uploads to one place, as a GPU does."""

    max_graph_tokens = 4096

    def __init__(self) -> None:
        super().__init__()
        self._buffer = np.zeros(1 << 20, np.uint8)

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        tensors, at = [], 0
        for array in arrays:
            place = self._buffer[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            place[...] = array
            tensors.append(torch.from_numpy(place))
            at += -(-array.nbytes // 16) * 16
        return tensors

    def create_runner(self, max_graph_rows: int, max_prompt_tokens: int, ops: Ops) -> ReplayRunner:
        return ReplayRunner(max_graph_rows, max_prompt_tokens)


def replay_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines run padded steps as a `ReplayRunner` does."""

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(connect_module, "create_device", lambda *_: ReplayDevice())
    monkeypatch.setattr(
        contexts, "create_attention_backend", lambda _, ops, *args, **kwargs: RowsBackend(ops)
    )
