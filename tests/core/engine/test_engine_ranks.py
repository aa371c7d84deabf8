"""Engines that are ranks of one model, over gloo: the tokens of one rank, and what they agree on.

They are threads of this process, and their schedulers are told the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.engine_ranks import engines, together
from helpers.engine_runs import Reference, drive, greedy
from helpers.family_cases import CASES, SIZES
from helpers.local_ranks import UNEVEN
from helpers.model_harness import make_reference, random_ids
from minisgl.core import SamplingParams
from minisgl.engine import Engine
from minisgl.engine.cpu import CpuDevice

LAYOUTS = (
    *("llama", "gpt-oss", "gemma4-shared", "gemma4-experts", "lfm2-moe", "falcon-h1"),
    *("nemotron-h", "nemotron-3-latent-stacked"),
)
"""Cases whose layers need other pools, groups or exchanges. The weights and heads of all cases, and
of all uneven ones: test_tensor_parallel.py."""

UNEVEN_POOLS = (
    *("3-kv-heads-on-2", "14-heads-on-3", "mixtral-on-4", "one-kv-head-tied"),
    "empty-vocabulary-share",
)

# name -> (ranks, options of the engine)
OF_FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (2, {}) for name in LAYOUTS},
    **{name: (UNEVEN[name][2], {}) for name in UNEVEN_POOLS},
}
BY_NUMBER: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (2, {"ep": True}) for name in ("qwen3-moe", "granite4-moe")},
    "qwen3-next-moe-6-heads-stacked": (2, {"ep": True}),
    "14-heads-moe-on-3": (3, {"ep": True}),
}

OF_THE_CORE = ("llama", "mixtral", "qwen2", "qwen3-moe")
"""The beginnings of the names of cases that the core builds without another package."""

LENGTHS = (37, 3, 20)  # the first in chunks


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name.startswith(OF_THE_CORE) else (pytest.mark.needs("minisgl_zoo"),)


def tokens(ranks: list[Engine], vocab_size: int, sampling: SamplingParams) -> list[list[int]]:
    """Of three requests in two turns, the same on all ranks."""
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    requests = [([i % vocab_size for i in prompt], sampling) for prompt in prompts]

    def run(engine: Engine) -> list[list[int]]:
        return drive(engine, requests, turns=[0, 0, 3], vocab_size=vocab_size)

    first, *others = together(run, ranks)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        pytest.param(name, *case, id=name + "-by-number" * bool(case[1]), marks=marks_of(name))
        for cases in (OF_FAMILIES, BY_NUMBER)
        for name, case in cases.items()
    ],
)
def test_tokens_are_those_of_one_rank(
    name: str, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    config_class, changes, *_ = CASES.get(name) or UNEVEN[name]
    config = config_class(**{**SIZES, **changes})
    make_reference(config).save_pretrained(
        tmp_path / "model", save_original_format=not name.endswith("stacked")
    )
    with engines(tmp_path / "model", tmp_path / "one", 1) as alone:
        expected = tokens(alone, config.vocab_size, greedy(12))
    with engines(tmp_path / "model", tmp_path / "many", size, **options) as ranks:
        assert tokens(ranks, config.vocab_size, greedy(12)) == expected


def test_all_have_as_many_pages_as_the_smallest(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_pages": None, "memory_ratio": 0.5}
    with engines(reference[0], tmp_path / "a", 2, **options) as ranks:
        of_rank_0 = ranks[0].memory
    needed = of_rank_0.weight_bytes + of_rank_0.activation_bytes

    def free_bytes(device: CpuDevice) -> int:
        return 2 * (needed + next(num_pages) * of_rank_0.group_page_bytes[0])

    num_pages = iter([60, 41])
    monkeypatch.setattr(CpuDevice, "free_bytes", free_bytes)
    with engines(reference[0], tmp_path / "b", 2, **options) as ranks:
        assert [engine.memory.num_pages for engine in ranks] == [41, 41]


@pytest.mark.parametrize("num_requests", [1, 8])  # of few all sample, of many each its share
def test_one_ranks_choice_counts(
    num_requests: int, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the other's logits say something else, as they may in the last bit."""
    requests = [([index + 1] * 5, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
                for index in range(num_requests)]  # fmt: skip
    with engines(reference[0], tmp_path / "store", 2) as ranks:
        logits = ranks[1].model.logits

        def others(x_SD: Tensor, own_rows: bool) -> Tensor:
            return -logits(x_SD, own_rows)

        monkeypatch.setattr(ranks[1].model, "logits", others)
        ours, theirs = together(lambda engine: drive(engine, requests), ranks)
        assert ours == theirs
        monkeypatch.undo()
    with engines(reference[0], tmp_path / "alone", 1) as alone:
        expected = drive(alone[0], requests)
    same = [got == wanted for got, wanted in zip(ours, expected, strict=True)]
    assert all(same) if num_requests == 1 else True in same and False in same
    assert not torch.distributed.is_initialized()
