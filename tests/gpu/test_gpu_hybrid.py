"""Models with recurrent layers on a GPU: the tokens of a CPU, and graphs on = off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engine_runs import drive, greedy, make_scheduler
from helpers.family_cases import SIZES
from helpers.hybrid_cases import HYBRID_CASES
from helpers.model_harness import VOCAB, make_reference, random_ids
from minisgl.core import SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.startup import start_engine

NAMES = ("qwen3.5", "qwen3-next-moe", "lfm2", "lfm3", "nemotron-h", "nemotron-3", "falcon-h1")


def save(name: str, folder: Path) -> None:
    config_class, changes, _, _ = HYBRID_CASES[name]
    sizes = {**SIZES, "max_position_embeddings": 1024, **changes}
    make_reference(config_class(**sizes)).save_pretrained(folder)


def make_engine(folder: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "device": "cuda",
        "num_pages": 256,
        "max_running_requests": 8,
        "max_prefill_length": 100,
    }
    return start_engine(EngineConfig(model=str(folder), **(settings | options)))


def tokens(engine: Engine, **options: Any) -> list[list[int]]:
    """Return the tokens of prompts with common prefixes: alone, together, and from the prefix
    cache."""
    try:
        stem = random_ids(150)
        prompts = [stem[:n] + random_ids(m, n) for n, m in ((150, 3), (128, 9), (100, 70), (30, 1))]
        requests = [(prompt, greedy(70)) for prompt in prompts]
        requests += [(prompts[0], SamplingParams(temperature=1.0, seed=7, max_tokens=40))]
        scheduler = make_scheduler(engine, vocab_size=VOCAB, **options)
        found = drive(engine, requests, scheduler=scheduler)
        assert drive(engine, requests, scheduler=scheduler, first_uid=10) == found
        assert scheduler.stats.num_cached_tokens >= 3 * 64
        for index, request in enumerate(requests):
            alone = make_scheduler(engine, vocab_size=VOCAB, **options)
            assert drive(engine, [request], scheduler=alone) == [found[index]]
        return found
    finally:
        engine.close()


@pytest.mark.parametrize("attn", ["torch", "triton"])
@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_those_of_a_cpu(name: str, graphs: int, attn: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    expected = tokens(make_engine(tmp_path, device="cpu", attn="torch"))
    engine = make_engine(tmp_path, attn=attn, dtype="float32", cuda_graph_max_bs=graphs)
    assert tokens(engine) == expected
    engine = make_engine(tmp_path, attn=attn, dtype="float32", cuda_graph_max_bs=graphs)
    assert tokens(engine, max_prefill_tokens=7) == expected


RELEASED: dict[str, dict[str, int]] = {
    "qwen3.5": {
        "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "head_dim": 256,
    },
    "nemotron-3": {
        "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2,
        "head_dim": 128, "chunk_size": 128,
    },
}  # fmt: skip
"""Sizes of heads and states of released models."""


@pytest.mark.parametrize("name", RELEASED)
@torch.inference_mode()
def test_a_model_of_released_sizes_runs(name: str, tmp_path: Path) -> None:
    """In bfloat16, with the kernel configs of released models, with graphs."""
    config_class, changes, _, _ = HYBRID_CASES[name]
    sizes = {
        **SIZES, **changes, "max_position_embeddings": 4096, "hidden_size": 256, **RELEASED[name],
    }  # fmt: skip
    make_reference(config_class(**sizes)).save_pretrained(tmp_path)
    engine = make_engine(tmp_path, dtype="bfloat16", max_prefill_length=2048, cuda_graph_max_bs=8)
    try:
        requests = [(random_ids(n, n), greedy(100)) for n in (1500, 64, 3)]
        together = drive(engine, requests, vocab_size=VOCAB)
        assert all(len(ids) == 100 for ids in together)
    finally:
        engine.close()
