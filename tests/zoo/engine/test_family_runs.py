"""Families through the real engine and scheduler: prompts of 1 to 330 tokens.

Whole, in chunks, the shortest and the longest alone, in a batch, from the prefix cache, and with
pages that windows free: all give the greedy tokens of transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from helpers.engine_runs import drive, greedy, make_scheduler
from helpers.family_cases import CASES, SIZES
from helpers.hybrid_cases import HYBRID_CASES
from helpers.model_harness import VOCAB, make_reference, random_ids
from minisgl.engine import Engine, EngineConfig

LENGTHS = (1, 5, 61, 330)
NUM_TOKENS = 8
NEAR_TIE = 1e-4
# Each kind of attention, window, sink, cap, latent, shared cache and recurrent layer, and mixtures:
# what a step's composition can change.
RUNS = (
    "phi3-window-old",
    "phi3-longrope",
    "smollm3",
    "granite",
    "olmo3-yarn",
    "exaone4-window-old",
    "cohere2",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-shared",
    "ministral3-window",
    "gpt-oss",
    "granite-moe-swa",
    "deepseek-v2-moe-groups-old",
    "mistral4-moe",
    "afmoe",
    "qwen3.5",
    "qwen3-next-moe",
    "lfm2",
    "lfm3",
    "falcon-h1",
    "granite4-moe",
    "nemotron-h",
    "nemotron-3-latent-stacked",
)


def choices(reference: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return the reference's choice after the prompt and after each token but the last, up to the
    first near tie, where the reference could not tell."""
    logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    first, second = logits.topk(2).values.T
    ties = (first - second < NEAR_TIE).nonzero().flatten().tolist()
    count = ties[0] if ties else len(tokens)
    assert count > 0
    return logits.argmax(-1)[:count].tolist()


@pytest.mark.parametrize("name", RUNS)
@torch.inference_mode()
def test_tokens_are_those_of_transformers_however_they_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class, changes, _, _ = {**CASES, **HYBRID_CASES}[name]
    sizes = {**SIZES, "max_position_embeddings": 1024, **changes}
    reference = make_reference(config_class(**sizes))
    reference.save_pretrained(tmp_path)
    # Up to its original length, transformers rotates longrope otherwise than beyond it.
    lengths = [n for n in LENGTHS if "longrope" not in name or n > 16]
    prompts = [random_ids(length, length) for length in lengths]
    requests = [(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    expected: list[list[int]] = []

    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    for attn, page_size, chunk in (("torch", 4, 640), ("cpu", 16, 48)):
        engine = Engine(
            EngineConfig(
                model=str(tmp_path),
                device="cpu",
                attn=attn,
                num_pages=2048 // page_size,
                page_size=page_size,
                max_prefill_length=chunk,
                max_running_requests=8,
                max_seq_len=1024,
            )
        )
        try:
            if not expected:
                first = drive(engine, requests, vocab_size=VOCAB)
                expected = [
                    choices(reference, prompt, tokens)
                    for prompt, tokens in zip(prompts, first, strict=True)
                ]
                requests = [
                    (prompt, greedy(len(ids)))
                    for prompt, ids in zip(prompts, expected, strict=True)
                ]
            scheduler = make_scheduler(engine, vocab_size=VOCAB)
            assert drive(engine, requests, scheduler=scheduler) == expected
            assert drive(engine, requests, scheduler=scheduler, first_uid=10) == expected
            assert scheduler.stats.num_cached_tokens > 0
            for index in (0, -1) if attn == "cpu" else ():
                alone = drive(engine, [requests[index]], vocab_size=VOCAB, cache="naive")
                assert alone == [expected[index]]
        finally:
            engine.close()


@torch.inference_mode()
def test_longrope_serves_its_original_length_unless_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to 16 tokens transformers takes the short factors. The case above takes the long ones."""
    config_class, changes, _, _ = CASES["phi3-longrope"]
    reference = make_reference(config_class(**{**SIZES, **changes}))
    reference.save_pretrained(tmp_path)
    prompts = [random_ids(length, length) for length in (1, 5, 11)]
    config = EngineConfig(
        model=str(tmp_path), device="cpu", attn="torch", num_pages=64, page_size=4
    )
    with caplog.at_level("INFO", logger="minisgl.engine.memory"):
        engine = Engine(config)
    try:
        assert engine.max_seq_len == 16
        assert "--max-seq-len 128 serves the longer one" in caplog.text
        tokens = drive(engine, [(prompt, greedy(5)) for prompt in prompts], vocab_size=VOCAB)
    finally:
        engine.close()
    for prompt, ours in zip(prompts, tokens, strict=True):
        theirs = choices(reference, prompt, ours)
        assert ours[: len(theirs)] == theirs
