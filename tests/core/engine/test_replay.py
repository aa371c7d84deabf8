"""Padded steps, replayed: what a graph would do again, done again on a CPU, gives the same tokens.

A replay here runs the work of the step that was captured, with all that its host knew then, over
what the step of now has put at the same addresses. So it is wrong where a graph would be.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from pathlib import Path

import pytest

from helpers.engine_runs import VOCAB, Request, drive, make_scheduler
from helpers.replay import ReplayRunner, replay_steps
from minisgl.core import SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.device import StepSize
from minisgl.engine.startup.graphs import capture_decodes
from minisgl.engine.tables import MIN_COMMON_TOKENS


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


@pytest.mark.needs("minisgl_bench.page_guard")
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
    requests = make_requests(14 if max_prefill > 1 else 3, rng)
    turns = sorted(rng.randrange(40) for _ in requests)
    config = EngineConfig(
        model=str(folder), device="cpu", attn="torch", page_size=page_size, num_pages=num_pages,
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
            model=str(folder), device="cpu", attn="torch", page_size=4, num_pages=400,
            max_running_requests=6, cuda_graph_max_bs=6,
        )
    )  # fmt: skip
    try:
        capture_decodes(engine)
        assert isinstance(engine.runner, ReplayRunner)
        before = set(engine.runner.captured)
        common = [index % VOCAB for index in range(MIN_COMMON_TOKENS + 4)]
        for temperature in (0.0, 1.0):
            for prompts in ([[1], [2], [3], [4], [5]], [[*common, index] for index in range(6)]):
                sampling = SamplingParams(max_tokens=5, temperature=temperature, seed=1)
                requests: list[Request] = [(prompt, sampling) for prompt in prompts]
                drive(engine, requests, scheduler=make_scheduler(engine))
        decodes = {shape for shape in engine.runner.captured if not isinstance(shape, StepSize)}
        assert decodes <= before
        assert {getattr(shape, "has_common_prefix", None) for shape in before} == {False, True}
    finally:
        engine.close()
