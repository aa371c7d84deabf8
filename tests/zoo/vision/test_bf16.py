"""In bfloat16 an answer about pictures is as near to the exact one as transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.pictures import PICTURES, Sample, chat
from helpers.seen import NUM_TOP, Eyes, Wide, reference, start

NOISE = 1.15
"""Rounding elsewhere changes the median of errors by a few percent. If the rows of an image have 5
bits instead of 8, it is more for each of these families."""


@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl", "gemma3", "lfm2_vl"])
def test_errors_are_no_larger(family: str, request: pytest.FixtureRequest) -> None:
    sample: Sample = request.getfixturevalue(family)
    engine = start(sample, max_prefill_length=512, dtype="bfloat16")
    [answer] = Eyes(sample, engine).ask([chat(*PICTURES)], prompt_logprobs=NUM_TOP)
    engine.close()
    theirs = copy.deepcopy(sample.model).bfloat16()
    with Wide():
        exact = reference(sample, copy.deepcopy(theirs).double(), answer, PICTURES)
    rounded = reference(sample, theirs, answer, PICTURES).double()
    tokens = torch.tensor([[token for token, _ in top] for top in answer.tops])
    ours = torch.tensor([[logprob for _, logprob in top] for top in answer.tops]).double()
    exact, rounded = (
        each.log_softmax(-1)[-len(ours) :].gather(1, tokens) for each in (exact, rounded)
    )
    error, allowed = ((each - exact).abs().median() for each in (ours, rounded))
    assert error < NOISE * allowed, (error, allowed)
