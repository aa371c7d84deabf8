"""Every family against transformers on tiny random checkpoints, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from helpers.dense_cases import DENSE_CASES
from helpers.family_cases import (
    ALL_EXPERTS,
    ALL_GPT_OSS,
    CASES,
    SIZES,
    check_case,
    save_case,
)
from helpers.model_harness import (
    CPU,
    VOCAB,
    Runner,
    Sequence,
    load,
    make_reference,
    random_ids,
    relative_error,
)
from minisgl.attention import create_attention_backend
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, page_size = save_case(name, tmp_path)
    check_case(reference, Runner(load(tmp_path), page_size=page_size), num_outputs=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("fast", [False, True], ids=["reference", "fast"])
@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (LlamaConfig, {}),
        (Qwen3Config, {}),
        (Qwen3MoeConfig, ALL_EXPERTS),
        (GptOssConfig, ALL_GPT_OSS),
        DENSE_CASES["gemma2"][:2],
        DENSE_CASES["gemma4-shared"][:2],
    ],
)
@torch.inference_mode()
def test_16_bits_are_as_close_as_transformers(
    config_class: type[PreTrainedConfig],
    changes: dict[str, Any],
    fast: bool,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    """fast: the compiled kernels of a CPU, as the engine has them."""
    reference = make_reference(config_class(**{**SIZES, "num_hidden_layers": 3, **changes}))
    reference.save_pretrained(tmp_path)
    sequence = Sequence(random_ids(60), 1)
    exact = reference(torch.tensor([sequence.prompt])).logits[0]
    theirs = reference.to(dtype)(torch.tensor([sequence.prompt])).logits[0].float()

    ops = create_ops(CPU) if fast else Ops()
    attn = create_attention_backend("cpu" if fast else "torch", ops)
    runner = Runner(load(tmp_path, dtype, ops=ops), page_size=4, ops=ops, attn=attn)
    runner.generate([sequence], chunk=17)

    ours = torch.cat(sequence.logits)
    assert ours.dtype == (dtype if fast else torch.float32)  # as `Ops.sample` takes them
    ours = ours.float()
    their_error = relative_error(theirs, exact)
    # Measured: 0.77 to 1.12 times their error.
    assert relative_error(ours, exact) <= 1.5 * their_error
    assert relative_error(ours, theirs) <= 2 * their_error


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
