"""Tensor parallelism on GPUs: `LLM(tp=N)` and the server, beside one GPU.

Float32 must give the same greedy tokens. In bfloat16 sums in another order flip near ties, after
which two answers go on differently: of the built-in model's, 9 of 10 must begin with the same 8
tokens.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from transformers import (
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from helpers.model_harness import make_reference
from minisgl.builtin import model_path
from minisgl.errors import MinisglError
from minisgl.llm import LLM, RequestOutput, SamplingParams
from minisgl.models.loading.reading import read_config

SIZES = [2, 4]
VOCAB = read_config(model_path()).vocab_size + 3  # its tokenizer's; divides by nothing
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,  # a half of 1,280 rows then goes through shared memory by shares
    "intermediate_size": 520,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**COMMON, num_attention_heads=8, num_key_value_heads=2, head_dim=64),
    "qwen2": Qwen2Config(**COMMON, num_attention_heads=6, num_key_value_heads=3, head_dim=64),
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
MIXTURES: dict[str, PreTrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**COMMON, **HEADS, **EXPERTS, head_dim=64, decoder_sparse_step=2),
    "mixtral": MixtralConfig(**COMMON, **HEADS, num_local_experts=5, sliding_window=None),
    "qwen2-moe": Qwen2MoeConfig(
        **COMMON, **HEADS, **EXPERTS, shared_expert_intermediate_size=72, norm_topk_prob=False
    ),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "num_pages": 1024,
    "max_running_requests": 16,
    "progress": False,
}
LENGTHS = (5, 1, 40, 17, 300, 2500, 64, 9, 130, 33)


def needs(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")


def prompts() -> list[list[int]]:
    """The last has a common prefix with the longest."""
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    return [*ids, [*ids[5][:700], 1, 2, 3]]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def run(folder: Path | None, **options: Any) -> list[list[int]]:
    """Twice the same: the second time with prefix hits, and with graphs of every size seen."""
    with LLM(folder, **(OPTIONS | options)) as llm:
        first = tokens(llm.generate(prompts(), GREEDY))
        assert tokens(llm.generate(prompts(), GREEDY)) == first
        return first


def saved(config: PreTrainedConfig, folder: Path) -> Path:
    """A checkpoint of random weights."""
    make_reference(config).save_pretrained(folder)
    for path in model_path().glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A folder, and what one GPU makes of the prompts in float32."""
    needs(2)
    folder = saved(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))
    return folder, run(folder, dtype="float32")


@pytest.mark.parametrize("disable_pynccl", [False, True], ids=["pynccl", "torch-nccl"])
@pytest.mark.parametrize("size", SIZES)
def test_float32_tokens_are_those_of_one_gpu(
    checkpoint: tuple[Path, list[list[int]]],
    size: int,
    disable_pynccl: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs(size)
    monkeypatch.setenv("MINISGL_CHECK_PLANS", "1")
    folder, expected = checkpoint
    got = run(folder, dtype="float32", tp=size, disable_pynccl=disable_pynccl)
    assert got == expected


@pytest.mark.parametrize("family", MIXTURES)
def test_float32_tokens_of_mixtures_are_those_of_one_gpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts split by width, and by expert: then ranks have different numbers of them."""
    needs(2)
    monkeypatch.setenv("MINISGL_CHECK_PLANS", "1")
    folder = saved(MIXTURES[family], tmp_path)
    expected = run(folder, dtype="float32")
    for size in SIZES:
        if torch.cuda.device_count() >= size:
            assert run(folder, dtype="float32", tp=size) == expected
            assert run(folder, dtype="float32", tp=size, ep=True) == expected


@pytest.mark.parametrize(("graphs", "overlap_off"), [(0, "0"), (16, "1")])
def test_neither_graphs_nor_overlap_change_tokens(
    checkpoint: tuple[Path, list[list[int]]],
    graphs: int,
    overlap_off: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", overlap_off)
    folder, expected = checkpoint
    assert run(folder, dtype="float32", tp=2, cuda_graph_max_bs=graphs) == expected


@pytest.mark.parametrize("size", SIZES)  # of the built-in model's 2 KV heads, four ranks share
def test_bfloat16_begins_as_on_one_gpu(size: int) -> None:
    needs(size)
    questions = [[{"role": "user", "content": f"What is {a} + {a + 7}?"}] for a in range(10, 30)]
    options = OPTIONS | {"dtype": "bfloat16"}
    with LLM(**options) as llm:
        expected = tokens(llm.chat(questions, GREEDY))
    with LLM(**options, tp=size) as llm:
        got = tokens(llm.chat(questions, GREEDY))
    same = sum(one[:8] == other[:8] for one, other in zip(got, expected, strict=True))
    assert same >= 0.9 * len(questions)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU is to be seen: as many ranks as the model has heads may be fewer than there are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(MinisglError, match="need a GPU each, but torch finds 1; lower"):
        LLM(tp=2, **OPTIONS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_server(rank: int, launch: Any) -> None:
    needs(2)
    flags = ("--tp", "2", "--device", "cuda", "--num-pages", "1024")
    server = launch(*flags)
    with server.client() as client:
        stream = client.completions.create(
            model="minisgl-builtin",
            prompt="a",
            stream=True,
            max_tokens=2000,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        family = server.family()
        os.kill(server.pid(f"engine-{rank}"), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(openai.APIError, match=f"engine-{rank} process was killed by signal 9"):
            list(stream)
        assert time.monotonic() - began < 2
        assert server.ended() == 1
        assert time.monotonic() - began < 3  # the driver takes a GPU's memory back
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
