"""Decode steps that are replayed from recordings give the tokens of steps that are not.

Planted once, and noticed: uploads to another place each time, one recording for all numbers of
rows.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.engine_runs import VOCAB, Request, drive, make_scheduler
from minisgl.core import Batch, SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.kernel.cpu import CpuOps
from minisgl_kernels.recorded_steps import RecordingRunner


def make_requests(count: int, rng: random.Random) -> list[Request]:
    """Greedy and random rows, some with options that no recording knows."""
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))],
            SamplingParams(
                max_tokens=rng.randrange(1, 40),
                temperature=rng.choice([0.0, 0.0, 1.0]),
                top_k=rng.choice([0, 7]),
                presence_penalty=rng.choice([0.0, 0.0, 0.5]),
                seed=index,
            ),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_cache_dtype"),
    [
        ("bfloat16", None, "int8"),
        ("bfloat16", "int8", "auto"),
        ("bfloat16", "int4", "int8"),
        ("float32", None, "auto"),
    ],
)
def test_the_same_tokens(
    folder: Path, dtype: str, quantization: str | None, kv_cache_dtype: str
) -> None:
    rng = random.Random(0)
    requests = make_requests(24, rng)
    turns = sorted(rng.randrange(40) for _ in requests)

    def answers(max_rows: int) -> tuple[list[list[int]], dict[tuple[int, int], bool]]:
        engine = Engine(
            EngineConfig(
                model=str(folder), device="cpu", dtype=dtype, page_size=4, num_pages=100,
                max_running_requests=12, max_prefill_length=40, cuda_graph_max_bs=max_rows,
                quantization=quantization, kv_cache_dtype=kv_cache_dtype,
            )
        )  # fmt: skip
        try:
            tokens = drive(engine, requests, turns=turns, scheduler=make_scheduler(engine))
            recordings = getattr(engine.runner, "_recordings", {})
            return tokens, {key: bool(recording) for key, recording in recordings.items()}
        finally:
            engine.close()

    expected, none = answers(0)
    got, recorded = answers(8)
    assert got == expected
    assert not none
    assert sum(recorded.values()) > 4, "the steps were replayed"
    assert max(rows for rows, _ in recorded) <= 8


def test_a_model_that_reads_numbers_is_not_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", num_pages=64))
    forward = engine.model.forward

    def reads(batch: Batch) -> Tensor:
        assert min(batch.input_ids.tolist()) >= 0
        return forward(batch)

    monkeypatch.setattr(engine.model, "forward", reads)
    try:
        drive(engine, [([1, 2, 3], SamplingParams(max_tokens=9))])
        assert isinstance(engine.runner, RecordingRunner)
        assert not any(engine.runner._recordings.values())
        assert engine.runner._max_rows == 0, "the next steps do not try again"
    finally:
        engine.close()


def test_steps_of_many_rows_with_ops_of_torch(folder: Path) -> None:
    """Float32 weights of more rows are multiplied by torch."""
    engine = Engine(EngineConfig(model=str(folder), device="cpu", dtype="float32", num_pages=64))
    try:
        assert isinstance(engine._ops, CpuOps)
        engine._ops.most_plain_rows = 2
        found = {}
        for uid, rows in ((0, 5), (10, 2), (20, 5), (30, 2)):
            params = SamplingParams(temperature=0.0, max_tokens=9)
            requests = [([1, 2, 3 + i], params) for i in range(rows)]
            found[uid] = drive(engine, requests, first_uid=uid)
        assert isinstance(engine.runner, RecordingRunner)
        assert {rows for (rows, _), made in engine.runner._recordings.items() if made} == {2, 5}
        assert found[0] == found[20]
        assert found[10] == found[30] == found[0][:2]
    finally:
        engine.close()


def test_a_recording_belongs_to_a_number_of_threads(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", num_pages=64))
    try:
        for threads in (1, 2):
            engine.device.set_threads(threads)
            drive(engine, [([1, 2, 3], SamplingParams(max_tokens=9))], first_uid=threads)
        assert isinstance(engine.runner, RecordingRunner)
        assert {threads for _, threads in engine.runner._recordings} == {1, 2}
        assert torch.get_num_threads() == 1, "the test's own thread"
    finally:
        engine.close()
