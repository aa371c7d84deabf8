"""Every family against transformers on tiny random checkpoints, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers.aliases import ALIASES
from helpers.family_cases import CASES, SIZES, check_case, save_case
from helpers.model_harness import VOCAB, Runner, load, make_reference, random_ids
from helpers.rounding_error import errors, margin_of
from minisgl.models.registry import supported_architectures

# Each of the blocks, norms, activations, rotations, caps and scales that some family has.
ROUNDINGS = (
    "afmoe", "cohere2-moe", "cwm", "deepseek-v2-moe", "exaone4", "falcon-h1", "gemma", "gemma2",
    "gemma3", "gemma4", "gemma4-unified", "glm4", "gpt-oss", "granite-moe-swa", "granite4-moe",
    "hunyuan-moe", "lfm2", "lfm3", "minimax-m2-moe", "ministral3", "mistral4-moe", "mixtral",
    "nemotron-h", "olmo2", "qwen3-next-moe", "qwen3.5",
)  # fmt: skip


def test_each_architecture_has_a_case() -> None:
    classes = AutoModelForCausalLM._model_mapping
    tested = {classes[config_class].__name__ for config_class, *_ in CASES.values()}
    # transformers has them inside models of text and images alone: test_wrappers.py
    inside = {"MuseGlimmerForCausalLM", "Qwen3VLMoeTextForCausalLM"}
    assert tested | inside | set(ALIASES) == set(supported_architectures())


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, page_size = save_case(name, tmp_path)
    check_case(reference, Runner(load(tmp_path), page_size=page_size), num_outputs=13)


@pytest.mark.parametrize("name", ROUNDINGS)
@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_transformers(name: str, tmp_path: Path) -> None:
    """With the compiled kernels of a CPU, as the engine has them."""
    pairs = [errors(name, seed, tmp_path / str(seed), torch.bfloat16) for seed in range(3)]
    ours, theirs = (sum(each) for each in zip(*pairs, strict=True))
    assert ours <= margin_of(name) * theirs


@pytest.mark.parametrize("fast", [False, True], ids=["reference", "fast"])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "gemma2"])
@torch.inference_mode()
def test_float16_is_as_close_to_float32_as_transformers(
    name: str, fast: bool, tmp_path: Path
) -> None:
    ours, theirs = errors(name, 0, tmp_path, torch.float16, fast=fast)
    assert ours <= margin_of(name) * theirs


@torch.inference_mode()
def test_only_sample_positions_yield_logits(tmp_path: Path) -> None:
    make_reference(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    runner = Runner(load(tmp_path))
    row = (0, 0, 9, random_ids(9))
    whole = runner.step([row])
    for positions in ([8], [3, 8], []):
        part = runner.step([row], positions)
        assert part.shape == (len(positions), VOCAB)
        torch.testing.assert_close(part, whole[positions])
