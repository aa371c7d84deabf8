"""Padded steps, replayed: what a graph would do again, done again on a CPU, gives the same tokens.

A replay here runs the work of the step that was captured, with all that its host knew then, over
what the step of now has put at the same addresses. So it is wrong where a graph would be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from test_equalities import VOCAB, Request, drive, make_scheduler
from torch import Tensor

from minisgl.attention import AttnLayer, BaseAttnMetadata
from minisgl.attention.torch_backend import TorchAttnBackend, _attend
from minisgl.core import Plan, PoolBatch, SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.engine import connect as connect_module
from minisgl.engine import engine as engine_module
from minisgl.engine.cpu import CpuDevice
from minisgl.engine.device import StepSize
from minisgl.engine.graph import GraphRunner
from minisgl.engine.startup.graphs import capture_decodes
from minisgl.engine.tables import MIN_SHARED_TOKENS


class RowsBackend(TorchAttnBackend):
    """Reads the rows where a graph's kernels read them."""

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
    """The first step of a shape is the one that is done again."""

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

    def create_runner(self, max_graph_rows: int, max_prompt_tokens: int) -> ReplayRunner:
        return ReplayRunner(max_graph_rows, max_prompt_tokens)


def make_requests(count: int, rng: random.Random) -> list[Request]:
    beginnings = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    return [
        (
            rng.choice(beginnings)[: rng.randrange(41)]
            + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))],
            SamplingParams(
                max_tokens=rng.randrange(1, 40),
                temperature=rng.choice([0.0, 0.0, 1.0]),
                top_k=rng.choice([0, 0, 7]),
                min_p=rng.choice([0.0, 0.0, 0.1]),
                seed=index,
            ),
        )
        for index in range(count)
    ]


def replay_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines run padded steps as a `ReplayRunner` does."""

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(connect_module, "create_device", lambda *_: ReplayDevice())
    monkeypatch.setattr(
        engine_module, "create_attention_backend", lambda _, ops, *args, **kwargs: RowsBackend(ops)
    )


@pytest.mark.parametrize(
    ("page_size", "num_pages", "max_running", "max_graph_rows", "max_prefill"),
    [(4, 100, 12, 256, 40), (1, 500, 12, 5, 100), (16, 24, 7, 1, 64), (16, 12, 1, 256, 1)],
)
def test_replays_give_the_same_tokens(
    page_size: int,
    num_pages: int,
    max_running: int,
    max_graph_rows: int,
    max_prefill: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    rng = random.Random(0)
    requests = make_requests(24 if max_prefill > 1 else 4, rng)
    turns = sorted(rng.randrange(40) for _ in requests)
    config = EngineConfig(
        folder=folder, device="cpu", attn="torch", page_size=page_size, num_pages=num_pages,
        max_running_requests=max_running, max_prefill_length=max_prefill,
        cuda_graph_max_bs=max_graph_rows,
    )  # fmt: skip

    def answers() -> tuple[list[list[int]], set[Hashable]]:
        engine = Engine(config)
        try:
            scheduler = make_scheduler(engine)
            tokens = drive(engine, requests, turns=turns, scheduler=scheduler)
            return tokens, set(getattr(engine.runner, "captured", ()))
        finally:
            engine.close()

    expected, _ = answers()
    replay_steps(monkeypatch)
    got, shapes = answers()
    assert got == expected
    sizes = {shape for shape in shapes if isinstance(shape, StepSize)}
    assert sizes < shapes
    assert {size.num_decodes > 0 for size in sizes} == ({True, False} if max_prefill > 1 else set())
    # What the memory plan counts.
    assert max((size.num_prompt_tokens for size in sizes), default=0) <= max_prefill


def test_decode_graphs_are_there_before_the_first_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with a common prefix and without, greedy and random, capture nothing."""
    replay_steps(monkeypatch)
    engine = Engine(
        EngineConfig(
            folder=folder, device="cpu", attn="torch", page_size=4, num_pages=400,
            max_running_requests=6, cuda_graph_max_bs=6,
        )
    )  # fmt: skip
    try:
        capture_decodes(engine)
        assert isinstance(engine.runner, ReplayRunner)
        before = set(engine.runner.captured)
        common = [index % VOCAB for index in range(MIN_SHARED_TOKENS + 4)]
        for temperature in (0.0, 1.0):
            for prompts in ([[1], [2], [3], [4], [5]], [[*common, index] for index in range(6)]):
                sampling = SamplingParams(max_tokens=5, temperature=temperature, seed=1)
                requests: list[Request] = [(prompt, sampling) for prompt in prompts]
                drive(engine, requests, scheduler=make_scheduler(engine))
        decodes = {shape for shape in engine.runner.captured if not isinstance(shape, StepSize)}
        assert decodes <= before
        assert {getattr(shape, "is_shared", None) for shape in before} == {False, True}
    finally:
        engine.close()
