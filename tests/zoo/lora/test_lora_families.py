"""Greedy ids with an adapter equal those of transformers' model with the adapter merged in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import GREEDY, RandomAdapter, greedy_ids, with_tokenizer
from helpers.engine_ranks import engines, together
from helpers.engine_runs import drive, make_scheduler
from helpers.family_cases import save_case
from helpers.model_harness import VOCAB
from minisgl.core.adapters import read_adapters
from minisgl.llm import LLM

FAMILIES = [
    "llama",
    "llama-biases",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "glm",
    "cohere",
    "olmo2",
    "gemma2",
    "gemma4",
    "qwen2-moe",
    "deepseek-v3-moe",
]
PROMPTS = ([7, 99, 3, 150, 42, 8, 61], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19])


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_those_of_the_merged_model(name: str, tmp_path: Path) -> None:
    reference, page_size = save_case(name, tmp_path / "model")
    adapters = [
        RandomAdapter.of(tmp_path / "every", reference, seed=1, rank=5, alpha=7.0),
        RandomAdapter.of(
            tmp_path / "some",
            reference,
            seed=2,
            rank=3,
            layers=r"layers\.0\.|down_proj|out_proj",
            ranks={"down_proj": 9},
            alphas={"o_proj": 2.0},
            use_rslora=True,
        ),
    ]
    with LLM(
        with_tokenizer(tmp_path / "model"),
        dtype="float32",
        lora={adapter.folder.name: adapter.folder for adapter in adapters},
        page_size=max(page_size, 4),
        num_pages=64,
        max_running_requests=8,
        progress=False,
    ) as llm:
        for adapter in adapters:
            with adapter.merged(reference):
                expected = [greedy_ids(reference, prompt) for prompt in PROMPTS]
            outputs = llm.generate(PROMPTS, GREEDY, lora=adapter.folder.name)
            assert [output.token_ids for output in outputs] == expected
        expected = [greedy_ids(reference, prompt) for prompt in PROMPTS]
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("name", ["glm", "nemotron-h"])
def test_two_ranks_have_their_parts_of_reordered_and_cut_layers(name: str, tmp_path: Path) -> None:
    reference, page_size = save_case(name, tmp_path / "model")
    adapter = RandomAdapter.of(tmp_path / "adapter", reference, seed=1, rank=5)
    with adapter.merged(reference):
        expected = [greedy_ids(reference, prompt) for prompt in PROMPTS]
    given = {"a": str(adapter.folder)}
    options: dict[str, Any] = {"lora": given, "max_loras": 1, "page_size": max(page_size, 4)}
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    (named,) = read_adapters(given).values()
    with engines(tmp_path / "model", tmp_path / "store", 2, **options) as ranks:
        schedulers = [make_scheduler(rank, num_slots=1, vocab_size=VOCAB) for rank in ranks]
        outputs = together(
            lambda rank, each: drive(rank, requests, scheduler=each, adapter=named),
            ranks,
            schedulers,
        )
        assert outputs == [expected] * 2
