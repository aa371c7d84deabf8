"""Families that transformers has not, or under another family's class."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from helpers.aliases import ALIASES, save_alias
from helpers.family_cases import check_case
from helpers.local_ranks import ranks
from helpers.model_harness import Runner, load
from minisgl.distributed import DistributedCommunicator
from minisgl.models.registry import get_model_class


@pytest.mark.parametrize("architecture", ALIASES)
@torch.inference_mode()
def test_an_alias_is_served_as_released(architecture: str, tmp_path: Path) -> None:
    reference = save_alias(architecture, tmp_path)
    check_case(reference, Runner(load(tmp_path), page_size=4), num_outputs=24)


@pytest.mark.parametrize(
    ("spelling", "architecture"),
    [
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("LFM2ForCausalLM", "Lfm2ForCausalLM"),
        ("Ernie4_5_ForCausalLM", "Ernie4_5ForCausalLM"),
    ],
)
def test_an_architecture_has_another_spelling(spelling: str, architecture: str) -> None:
    assert get_model_class(spelling) is get_model_class(architecture)


@pytest.mark.parametrize("architecture", ALIASES)
def test_two_ranks_serve_it_too(architecture: str, tmp_path: Path) -> None:
    reference = save_alias(architecture, tmp_path)

    def check(comm: DistributedCommunicator) -> None:
        with torch.inference_mode():
            check_case(reference, Runner(load(tmp_path, comm=comm)), num_outputs=6)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, ranks(2)))
