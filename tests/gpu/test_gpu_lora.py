"""Adapters on a GPU: the ids of merged models, in float32, with graphs and without."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.adapters import GREEDY, RandomAdapter, as_batch, greedy_ids, with_tokenizer
from helpers.family_cases import save_case
from minisgl.core import SamplingParams
from minisgl.llm import LLM

NUM = 8
PROMPTS = [[uid + 3, 99, 3, 150, 42, 8, 61 + uid] * (1 + uid % 3) for uid in range(NUM)]
FAMILIES = [
    "qwen3",
    "phi3",
    "glm",
    "gemma4",
    "qwen2-moe",
    "deepseek-v3-moe",
    "qwen3.5",
    "nemotron-h",
]


@dataclass
class Setup:
    reference: PreTrainedModel
    model: Path
    page_size: int
    adapters: list[RandomAdapter]

    @property
    def lora(self) -> dict[str, Path]:
        return {adapter.folder.name: adapter.folder for adapter in self.adapters}

    def expected(self, count: int = 10) -> list[list[int]]:
        found = []
        for adapter, prompt in zip(self.adapters, PROMPTS, strict=True):
            with adapter.merged(self.reference):
                found.append(greedy_ids(self.reference, prompt, count))
        return found

    def llm(self, **options: Any) -> LLM:
        given = {"num_pages": 256, "page_size": max(self.page_size, 4), "attn": "triton"}
        return LLM(
            self.model, dtype="float32", device="cuda", lora=self.lora, progress=False,
            max_running_requests=16, **{**given, **options},
        )  # fmt: skip


def make(name: str, folder: Path) -> Setup:
    reference, page_size = save_case(name, folder / "model")
    layers = ("", "down_proj|out_proj", r"layers\.1\.", "q_|k_|qkv|o_proj|in_proj")
    adapters = [
        RandomAdapter.of(
            folder / f"a{i}", reference, seed=i, rank=1 + 2 * i, layers=layers[i * 3 % 4]
        )
        for i in range(NUM)
    ]
    return Setup(reference, with_tokenizer(folder / "model"), page_size, adapters)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make("qwen3", tmp_path_factory.mktemp("adapted"))


def ids(llm: LLM, setup: Setup, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = as_batch(llm, [*setup.lora, None], [*PROMPTS, PROMPTS[0]], params)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("graphs", [0, 16])
@pytest.mark.parametrize("slots", [3, 8])
def test_ids_equal_those_of_merged_models(setup: Setup, graphs: int, slots: int) -> None:
    """Twice, so that the second batch replays what the first has captured."""
    base = greedy_ids(setup.reference, PROMPTS[0])
    with setup.llm(cuda_graph_max_bs=graphs, max_loras=slots) as llm:
        for _ in range(3):
            assert ids(llm, setup) == [*setup.expected(), base]
            assert llm.generate([PROMPTS[0]], GREEDY)[0].token_ids == base
        if graphs:
            shapes = llm._engine.engine.runner._graphs  # type: ignore[attr-defined] # of one rank
            assert any(isinstance(shape, tuple) for shape in shapes), "steps with adapters"


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_has_the_ids_of_merged_models(name: str, tmp_path: Path) -> None:
    setup = make(name, tmp_path)
    with setup.llm(cuda_graph_max_bs=16, attn="auto") as llm:
        for _ in range(2):
            assert ids(llm, setup)[:NUM] == setup.expected()


def test_two_gpus_give_the_ids_of_one(setup: Setup) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(reason="it needs two GPUs")
    with setup.llm(tp=2) as llm:
        assert ids(llm, setup)[:NUM] == setup.expected()


def test_seeded_answers_do_not_depend_on_graphs(setup: Setup) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
    with setup.llm(cuda_graph_max_bs=0) as llm:
        expected = ids(llm, setup, params)
    with setup.llm(cuda_graph_max_bs=16) as llm:
        assert [ids(llm, setup, params) for _ in range(2)] == [expected] * 2


def test_speed_of_8_adapters_in_64_streams(tmp_path: Path) -> None:
    """Not a bound: it prints tokens/s of the shapes of Qwen3-0.6B without and with adapters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
    config.save_pretrained(tmp_path / "model")
    with_tokenizer(tmp_path / "model")
    lora = {
        f"a{i}": RandomAdapter.of(tmp_path / f"a{i}", model, seed=i, rank=16, size=0.01).folder
        for i in range(NUM)
    }
    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
    prompts = [[i, i + 1, i + 2] * 40 for i in range(64)]
    with LLM(
        tmp_path / "model", device="cuda", dummy_weight=True, lora=lora, progress=False,
        max_running_requests=64,
    ) as llm:  # fmt: skip
        rates: dict[str, list[float]] = {}
        for turn in range(4):  # the first captures graphs
            for kind, names in (("base", [None]), ("one", ["a0"]), ("eight", list(lora))):
                begun = time.perf_counter()
                as_batch(llm, [names[i % len(names)] for i in range(64)], prompts, params)
                if turn:
                    rate = 64 * params.max_tokens / (time.perf_counter() - begun)
                    rates.setdefault(kind, []).append(rate)
    best = {kind: max(each) for kind, each in rates.items()}
    shares = {kind: round(rate / best["base"], 3) for kind, rate in best.items()}
    print(f"\n64 streams, tokens/s: {best}, of base: {shares}")
    assert all(best.values())
