"""Two released models answer as llama.cpp does (`scripts/real_models.py` fetches them).

llama.cpp's ids are in `real_models.json`, which that script writes. It multiplies inputs that are
rounded to 8 bits, so its greedy answers leave ours at near ties.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams

sys.path.append(str(Path(__file__).parents[3] / "scripts"))

from real_models import GOLDEN, MODELS, NASTY, cache

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NEAR = 0.3
"""Nats between our token and llama.cpp's, where the answers part. The largest seen is 0.18."""
TEXT = Path(__file__).parents[3] / "benchmarks" / "texts" / "perplexity.txt"
WINDOW, WINDOWS = 200, 3  # tokens


def file_of(name: str) -> Path:
    path = cache() / MODELS[name].file
    if not path.is_file():
        pytest.skip(f"{path} is not there: run scripts/real_models.py")
    return path


@pytest.fixture(scope="module", params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    return found


@pytest.fixture(scope="module")
def packed(name: str) -> Iterator[LLM]:
    """The file's own numbers, which stay packed."""
    with LLM(str(file_of(name)), dtype="bfloat16", max_seq_len=512, progress=False) as llm:
        yield llm


def test_tokenizers_agree(packed: LLM, golden: dict[str, Any]) -> None:
    for text, ids in zip(NASTY, golden["nasty"], strict=True):
        assert packed.tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
    for answer in golden["answers"]:
        assert packed.tokenizer.encode(answer["prompt"]) == answer["ids"], answer["prompt"]


def test_greedy_answers_are_those_of_llama_cpp(packed: LLM, golden: dict[str, Any]) -> None:
    """Up to the first near tie, and most answers to their end."""
    answers = golden["answers"]
    count = len(answers[0]["tokens"])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=True, top_logprobs=8
    )
    outputs = packed.generate([answer["ids"] for answer in answers], sampling)
    num_same = 0
    for answer, output in zip(answers, outputs, strict=True):
        theirs = [first for first, _, _ in answer["tokens"]]
        parted = [i for i in range(count) if output.token_ids[i] != theirs[i]]
        num_same += not parted
        if parted:
            tops = (output.top_logprobs or [])[parted[0]]
            gap = max(tops.values()) - tops.get(theirs[parted[0]], -math.inf)
            assert gap < NEAR, f"{answer['prompt']!r}: {gap} nats at token {parted[0]}"
    assert num_same >= len(answers) // 2, f"{num_same} of {len(answers)}"


def test_perplexity_is_that_of_float32(name: str, packed: LLM) -> None:
    """Of the packed file, beside the same file in float32: within 0.5 %."""
    with LLM(str(file_of(name)), dtype="float32", max_seq_len=512, progress=False) as exact:
        assert perplexity(packed) == pytest.approx(perplexity(exact), rel=0.005)


def perplexity(llm: LLM) -> float:
    text = TEXT.read_text(encoding="utf-8")
    ids = llm.tokenizer.encode(text)[: WINDOW * WINDOWS]
    sampling = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)], sampling)
    values = [x for output in outputs for x in output.prompt_logprobs or () if x is not None]
    return math.exp(-sum(values) / len(values))
