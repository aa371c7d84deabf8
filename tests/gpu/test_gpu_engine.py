"""The engine on a GPU in float32: transformers' tokens, however the steps are launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engine_runs import drive, greedy, prompts, save_reference
from helpers.guarded_runs import long_run, make_guarded
from helpers.masked_runs import masked_scheduler
from helpers.masked_runs import requests as masked_requests
from minisgl.core import SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.device import StepSize
from minisgl.engine.startup import start_engine
from minisgl_gateway.watch.profiler import StepProfiler

Checkpoint = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A folder, and what transformers answers greedily to the prompts."""
    folder, model = save_reference(tmp_path_factory.mktemp("qwen3"))
    outputs = []
    for prompt in prompts(6):
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(ids[0, len(prompt) :].tolist())
    return folder, outputs


def make_engine(checkpoint: Checkpoint, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "num_pages": 256,
        "max_running_requests": 16,
        "max_prefill_length": 64,
    }
    return start_engine(
        EngineConfig(model=str(checkpoint[0]), **({"device": "cuda"} | settings | options))
    )


def captured_sizes(engine: Engine) -> set[StepSize]:
    return {shape for shape in engine.runner._graphs if isinstance(shape, StepSize)}


def masked_tokens(engine: Engine) -> list[list[int]]:
    try:
        turns = [0, 3, 9, 9, 12, 14]
        return drive(engine, masked_requests(), turns=turns, scheduler=masked_scheduler(engine))
    finally:
        engine.close()


@pytest.mark.parametrize("graphs", [0, 16])
def test_masked_tokens_equal_those_of_a_cpu(checkpoint: Checkpoint, graphs: int) -> None:
    expected = masked_tokens(make_engine(checkpoint, device="cpu", attn="torch"))
    engine = make_engine(checkpoint, attn="triton", cuda_graph_max_bs=graphs)
    assert masked_tokens(engine) == expected


@pytest.mark.parametrize(("graphs", "prompt_tokens"), [(0, 0), (16, 0), (16, 80)])
@pytest.mark.parametrize("attn", ["triton", "torch"])
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_equal_transformers(
    checkpoint: Checkpoint, attn: str, graphs: int, prompt_tokens: int, overlap: bool
) -> None:
    if attn == "torch" and prompt_tokens:
        pytest.skip("the reference captures no prompts")
    engine = make_engine(checkpoint, attn=attn, cuda_graph_max_bs=graphs)
    engine.runner.max_tokens = prompt_tokens
    try:
        requests = [(prompt, greedy()) for prompt in prompts(6)]
        assert drive(engine, requests, overlap=overlap) == checkpoint[1]
        assert drive(engine, requests, turns=[0, 3, 9, 9, 20, 21]) == checkpoint[1]
        for request, ids in zip(requests, checkpoint[1], strict=True):
            assert drive(engine, [request]) == [ids]
        if prompt_tokens:
            sizes = captured_sizes(engine)
            assert any(size.num_decodes for size in sizes)
            assert any(not size.num_decodes for size in sizes)
    finally:
        engine.close()


def test_a_common_prefix_is_read_once_with_the_same_tokens(checkpoint: Checkpoint) -> None:
    """300 tokens in common: decode takes the cascade, single requests do not."""
    common = (prompts(6)[0] * 300)[:300]
    requests = [([*common, *tail[:20]], greedy(24)) for tail in prompts(6)]
    engine = make_engine(checkpoint)
    try:
        together = drive(engine, requests)
        assert any(getattr(shape, "has_common_prefix", False) for shape in engine.runner._graphs)
        assert together == [drive(engine, [request])[0] for request in requests]
    finally:
        engine.close()


def test_random_tokens_do_not_depend_on_graphs(checkpoint: Checkpoint) -> None:
    requests = [
        (prompt, SamplingParams(temperature=0.8, seed=index, max_tokens=40, top_k=index * 5))
        for index, prompt in enumerate(prompts(6))
    ]
    got = []
    for graphs in (0, 8):
        engine = make_engine(checkpoint, cuda_graph_max_bs=graphs)
        engine.runner.max_tokens = 80 if graphs else 0
        got += [drive(engine, requests), drive(engine, requests)]  # the second time replayed
        engine.close()
    assert got[0] == got[1] == got[2] == got[3]


def test_engines_one_after_another_have_all_memory(checkpoint: Checkpoint) -> None:
    """Each takes most of the GPU for its pages, and gives it back. What cuBLAS keeps for a stream,
    32 MiB, stays: other engines' graphs may use theirs, and all are cleared at once."""
    sizes = []
    for num_prompts in (1, 6, 2):
        engine = make_engine(checkpoint, num_pages=None, cuda_graph_max_bs=16)
        sizes.append(engine.memory.num_pages)
        try:
            requests = [(prompt, greedy()) for prompt in prompts(6)[:num_prompts]]
            assert drive(engine, requests) == checkpoint[1][:num_prompts]
        finally:
            engine.close()
        assert torch.cuda.memory_reserved() < 2**30
    assert min(sizes) > 0.9 * max(sizes)


def test_retracted_requests_resume_with_the_same_tokens(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint, num_pages=24)
    try:
        assert drive(engine, [(p, greedy()) for p in prompts(6)]) == checkpoint[1]
    finally:
        engine.close()


def test_a_profile_names_steps_and_shows_kernels(checkpoint: Checkpoint, tmp_path: Path) -> None:
    engine = make_engine(checkpoint, cuda_graph_max_bs=16)
    try:
        profiler = StepProfiler()
        engine.named = profiler.named
        profiler.start()
        drive(engine, [(prompts(6)[0], greedy())])
        engine.synchronize()
        path, num_steps = profiler.stop(tmp_path, 0)
    finally:
        engine.close()
    events = json.loads(path.read_text())["traceEvents"]
    steps = {event["name"] for event in events if event.get("name", "").startswith("step ")}
    assert len(steps) == num_steps > 10
    assert any(": 1 decodes, 0 prompt tokens; 0" in name for name in steps)
    assert sum(event.get("cat") == "kernel" for event in events) > 10 * num_steps


def test_a_thousand_requests_touch_no_wrong_page(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With aborts, retractions, prefix hits and graphs; also what compute-sanitizer is run on."""
    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    engine = make_guarded(checkpoint[0], "cuda")
    try:
        finished, retractions = long_run(engine, 1000)
    finally:
        engine.close()
    assert finished == 1000
    assert retractions > 0
