"""Each family's pictures, against transformers: every position of the prompt and of the answer."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.pictures import PICTURES, Sample, chat
from helpers.seen import NUM_TOP, Eyes, check, start

CHUNKS = [
    *(("mistral3", 7), ("mistral3", 512), ("qwen3_5", 7)),
    *(("qwen3_vl", 64), ("qwen3_vl_moe", 64), ("qwen3_5_moe", 7)),
    *(("gemma3", 32), ("gemma4", 80), ("gemma4_e2b", 7), ("gemma4_unified", 80)),
    *(("lfm2_vl", 7), ("lfm2_vl_moe", 64)),
]


@pytest.fixture(params=["mistral3", "qwen3_5", "gemma3", "lfm2_vl"])
def sample(request: pytest.FixtureRequest) -> Sample:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("family", "chunk"), CHUNKS)
def test_one_and_four_pictures_in_chunks(
    family: str, chunk: int, request: pytest.FixtureRequest
) -> None:
    sample: Sample = request.getfixturevalue(family)
    engine = start(sample, max_prefill_length=chunk)
    for count in (1, 4):
        [answer] = Eyes(sample, engine).ask([chat(*PICTURES[:count])], prompt_logprobs=NUM_TOP)
        check(sample, answer, PICTURES[:count])
    engine.close()


def test_cached_prefixes_and_batches(sample: Sample) -> None:
    engine = start(sample, max_prefill_length=96)
    eyes = Eyes(sample, engine)
    shown: list[list[Any]] = [PICTURES[:2], PICTURES[1:4], [], PICTURES[:1], PICTURES[:2]]
    for _ in range(2):
        answers = eyes.ask([chat(*each) for each in shown])
        for answer, each in zip(answers, shown, strict=True):
            check(sample, answer, each)
    assert all(answer.end.num_cached_tokens for answer in answers if len(answer.prompt) > 40)
    engine.close()
