"""The same tokens however they are scheduled, and the tokens of Hugging Face transformers.

Tiny random models in float32 on the CPU, through the real engine, scheduler and loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers.engine_runs import (
    NUM_TOKENS,
    Reference,
    Request,
    drive,
    greedy,
    make_engine,
    make_scheduler,
    prompts,
)
from minisgl.core import SamplingParams
from minisgl.engine import Engine


@pytest.fixture(scope="module", params=[("torch", 1), ("cpu", 4), ("cpu", 16)], ids=str)
def engine(reference: Reference, request: pytest.FixtureRequest) -> Iterator[Engine]:
    attn, page_size = request.param
    engine = make_engine(reference, attn=attn, page_size=page_size)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    """transformers' greedy tokens. Its top-2 gaps are checked: no near-tie decides a test."""
    outputs = []
    for prompt in prompts(6):
        with torch.inference_mode():
            result = reference[1].generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
                eos_token_id=None,
                pad_token_id=0,
            )
        top2 = torch.cat(result.scores).topk(2).values
        assert (top2[:, 0] - top2[:, 1]).min() > 1e-4, "choose another seed: near-tie"
        outputs.append(result.sequences[0, len(prompt) :].tolist())
    return outputs


def test_batch_equals_transformers(engine: Engine, expected: list[list[int]]) -> None:
    assert drive(engine, [(prompt, greedy()) for prompt in prompts(6)]) == expected


def test_one_at_a_time_equals_batch(engine: Engine, expected: list[list[int]]) -> None:
    for prompt, ids in zip(prompts(6), expected, strict=True):
        assert drive(engine, [(prompt, greedy())]) == [ids]


@pytest.mark.parametrize("chunk", [1, 33])
def test_chunked_equals_whole(engine: Engine, expected: list[list[int]], chunk: int) -> None:
    requests = [(prompt, greedy()) for prompt in prompts(6)]
    assert drive(engine, requests, max_prefill_tokens=chunk) == expected


def test_staggered_arrivals(engine: Engine, expected: list[list[int]]) -> None:
    requests = [(prompt, greedy()) for prompt in prompts(6)]
    assert drive(engine, requests, turns=[0, 1, 2, 20, 21, 40]) == expected


def test_without_overlap(engine: Engine, expected: list[list[int]]) -> None:
    requests = [(prompt, greedy()) for prompt in prompts(6)]
    assert drive(engine, requests, overlap=False) == expected


def test_without_prefix_cache(engine: Engine, expected: list[list[int]]) -> None:
    requests = [(prompt, greedy()) for prompt in prompts(6)]
    assert drive(engine, requests, cache="naive") == expected


def test_cached_equals_fresh(engine: Engine, expected: list[list[int]]) -> None:
    """The second round finds its prompts, and a prompt with its answer, in the tree."""
    scheduler = make_scheduler(engine)
    requests = [(prompt, greedy()) for prompt in prompts(6)]
    assert drive(engine, requests, scheduler=scheduler) == expected
    assert drive(engine, requests, scheduler=scheduler, first_uid=10) == expected
    assert scheduler.stats.num_cached_tokens > 0
    longer = [
        (prompt + ids[:40], greedy(NUM_TOKENS - 40))
        for prompt, ids in zip(prompts(6), expected, strict=True)
    ]
    before = scheduler.stats.num_cached_tokens
    rest = [ids[40:] for ids in expected]
    assert drive(engine, longer, scheduler=scheduler, first_uid=20) == rest
    cached = scheduler.stats.num_cached_tokens - before
    assert cached > sum(len(prompt) for prompt, _ in longer) - 6 * 2 * engine.page_size


def test_shared_prefix_in_one_step(engine: Engine, reference: Reference) -> None:
    """Requests that arrive together with one prefix compute it once, with the same tokens."""
    root = prompts(1, seed=5)[0] * 3
    requests = [([*root, tail], greedy(8)) for tail in range(4)]
    alone = [drive(engine, [request])[0] for request in requests]
    scheduler = make_scheduler(engine, max_prefill_tokens=4096)
    assert drive(engine, requests, scheduler=scheduler) == alone
    computed = scheduler.stats.num_prompt_tokens - scheduler.stats.num_cached_tokens
    assert computed < len(root) + 4 * (engine.page_size + 1)


def test_retracted_equals_undisturbed(engine: Engine, expected: list[list[int]]) -> None:
    """A pool too small for all six: requests are retracted and resumed."""
    longest = max(len(prompt) for prompt in prompts(6)) + NUM_TOKENS
    num_pages = -(-longest // engine.page_size) + 40 // engine.page_size + 1
    scheduler = make_scheduler(engine, num_pages=num_pages)
    requests = [(prompt, greedy()) for prompt in prompts(6)]
    assert drive(engine, requests, scheduler=scheduler) == expected
    assert scheduler.stats.num_retractions > 0


def test_seeded_sampling_is_its_own(engine: Engine) -> None:
    """Same seed, same text, whatever else is in the batch; another seed, another text."""
    prompt = prompts(1)[0]

    def sampled(seed: int) -> Request:
        return prompt, SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=24)

    alone = drive(engine, [sampled(7)])[0]
    crowd = [(other, greedy()) for other in prompts(5, seed=3)]
    together = drive(engine, [*crowd[:2], sampled(7), *crowd[2:], sampled(8)], overlap=False)
    assert together[2] == alone
    assert together[-1] != alone


def test_two_engines_in_one_process(reference: Reference, expected: list[list[int]]) -> None:
    requests = [(prompt, greedy()) for prompt in prompts(6)]
    first, second = make_engine(reference), make_engine(reference, page_size=4)
    try:
        assert drive(first, requests) == expected
        assert drive(second, requests) == expected
        assert drive(first, requests) == expected
    finally:
        first.close()
        second.close()
