"""The memory table of `--dry-run` against what an engine takes on a GPU: few real layers."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from helpers.engine_runs import drive, greedy
from helpers.model_harness import random_ids
from minisgl.engine import EngineConfig
from minisgl.engine.startup import start_engine
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.shapes import SHAPES
from minisgl_gateway.dry_run import dry_run

LAYERS = {
    "qwen3-14b": 2,
    "qwen3-30b-a3b": 2,
    "gemma-4-31b": 6,
    "gemma-4-26b-a4b": 6,
    "gpt-oss-20b": 2,
    "qwen3.6-27b": 4,
    "qwen3.6-35b-a3b": 4,
}
"""So few that all of them fit in 80 GB beside one another."""


@pytest.mark.parametrize("shape", LAYERS)
def test_an_engine_takes_what_was_planned(shape: str, tmp_path: Path) -> None:
    """Weights and pools within 3 %, and steps with prompts and graphs no more than the table says.

    In bytes that torch has allocated: CUDA's context and modules are outside of `--memory-ratio`.
    """
    write_checkpoint(tmp_path, {**SHAPES[shape], "num_hidden_layers": LAYERS[shape]}, weights=False)
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dummy_weight=True, num_pages=2048, max_seq_len=16_384,
        max_running_requests=64, cuda_graph_max_bs=64,
    )  # fmt: skip
    table = dry_run(config).splitlines()[1:]  # the first line says what is free at the moment
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = start_engine(config)
    try:
        memory = engine.memory
        assert str(memory).splitlines()[1:] == table
        held = torch.cuda.memory_allocated() - before
        requests = [(random_ids(n, n), greedy(8)) for n in (9000, *range(1, 60))]
        drive(engine, requests, vocab_size=SHAPES[shape]["vocab_size"])
        engine.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        planned = memory.weight_bytes + memory.kv_bytes
        total = planned + memory.activation_bytes
        print(
            f"memory {shape}: held {held / planned:.4f} of {planned:,} planned; "
            f"at most {most / total:.4f} of {total:,}"
        )
        assert abs(held - planned) <= 0.03 * planned
        assert most <= 1.03 * total
    finally:
        engine.close()
