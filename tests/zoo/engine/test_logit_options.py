"""Options that change the logits: the tokens of a search with NumPy over transformers' logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from helpers.engine_ranks import engines, together
from helpers.engine_runs import (
    VOCAB,
    Reference,
    Request,
    drive,
    make_engine,
    make_scheduler,
    prompts,
)
from helpers.replay import replay_steps
from helpers.step_plans import MAX_RUNNING, arrays_of, make_plan
from minisgl.core import Failed, SamplingParams
from minisgl.engine import Engine
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.scheduling import scheduler_config
from minisgl_zoo import logit_options
from minisgl_zoo.logit_options import LogitOptions

NUM_TOKENS = 24
OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.4, "presence_penalty": 0.8},
    {"repetition_penalty": 0.8, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"logit_bias": {3: 1.5, 50: -100.0}, "presence_penalty": 1.0},
    {"allowed_token_ids": tuple(range(0, VOCAB, 7)), "frequency_penalty": 0.7},
    {"bad_words_ids": tuple((token,) for token in range(0, VOCAB, 3)), "presence_penalty": 0.5},
    {"bad_words_ids": tuple((a, b) for a in range(VOCAB) for b in (a, 50, 60, 70, 80))},
]


@pytest.fixture(scope="module", params=["torch", "cpu"])
def engine(reference: Reference, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(reference, attn=request.param, page_size=4)
    yield engine
    engine.close()


def requests(num_tokens: int = NUM_TOKENS) -> list[Request]:
    return [
        (prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, **options))
        for prompt, options in zip(prompts(len(OPTIONS)), OPTIONS, strict=True)
    ]


def changed(logits_V: Any, prompt: list[int], output: list[int], params: SamplingParams) -> Any:
    """The formulas of docs/api.md, token by token."""
    x_V = logits_V.copy()
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        x_V[token] = x_V[token] / penalty if x_V[token] > 0 else x_V[token] * penalty
    for token in set(output):
        x_V[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x_V[token] += bias
    for ids in params.bad_words_ids:
        if tuple(output[len(output) - len(ids) + 1 :]) == ids[:-1]:
            x_V[ids[-1]] = -1e30
    if params.allowed_token_ids is not None:
        x_V[[token for token in range(VOCAB) if token not in params.allowed_token_ids]] = -np.inf
    return x_V


def searched(reference: Reference, request: Request) -> list[int]:
    prompt, params = request
    output: list[int] = []
    for _ in range(params.max_tokens or 0):
        with torch.inference_mode():
            logits_V = reference[1](torch.tensor([prompt + output])).logits[0, -1].double().numpy()
        x_V = changed(logits_V, prompt, output, params)
        first, second = np.sort(x_V)[::-1][:2]
        assert first - second > 1e-4, "choose another seed: near-tie"
        output.append(int(x_V.argmax()))
    return output


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [searched(reference, request) for request in requests()]


def test_every_option_changes_the_output(expected: list[list[int]], engine: Engine) -> None:
    for (prompt, _), ids, options in zip(requests(), expected, OPTIONS, strict=True):
        plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        assert (drive(engine, [(prompt, plain)])[0] != ids) == bool(options)


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_of_numpy(
    engine: Engine, expected: list[list[int]], overlap: bool
) -> None:
    turns = [0, 1, 2, 5, 9, 9, 10, 12]
    assert drive(engine, requests(), turns=turns, overlap=overlap) == expected
    assert [drive(engine, [request])[0] for request in requests()] == expected


def test_cached_prefixes_and_chunks(engine: Engine, expected: list[list[int]]) -> None:
    scheduler = make_scheduler(engine, max_prefill_tokens=7)
    for first_uid in (0, 10):
        assert drive(engine, requests(), scheduler=scheduler, first_uid=first_uid) == expected
    assert scheduler.stats.num_cached_tokens > 0


def test_retracted_requests(engine: Engine, expected: list[list[int]]) -> None:
    longest = max(len(prompt) for prompt, _ in requests()) + NUM_TOKENS
    scheduler = make_scheduler(engine, num_pages=longest // engine.page_size + 4)
    assert drive(engine, requests(), scheduler=scheduler) == expected
    assert scheduler.stats.num_retractions > 0


def test_replayed_steps(
    reference: Reference, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_steps(monkeypatch)
    engine = make_engine(reference, device="cpu", attn="torch", page_size=4)
    try:
        assert drive(engine, requests(), turns=[0, 0, 0, 3, 9, 20, 20, 22]) == expected
    finally:
        engine.close()


def test_two_ranks(reference: Reference, expected: list[list[int]], tmp_path: Path) -> None:
    with engines(reference[0], tmp_path / "store", 2) as ranks:
        ours, theirs = together(lambda engine: drive(engine, requests()), ranks)
    assert ours == theirs == expected


def test_sequences_that_the_output_would_have(engine: Engine, reference: Reference) -> None:
    """Taken from the output without them; tokens of the prompt do not count."""
    prompt = prompts(1)[0]
    (ids,) = drive(engine, [(prompt, SamplingParams(temperature=0.0, max_tokens=12))])
    bad = (tuple(ids[2:4]), tuple(ids[5:9]), (prompt[-1], ids[0]), (VOCAB - 1,))
    params = SamplingParams(temperature=0.0, max_tokens=12, bad_words_ids=bad)
    (got,) = drive(engine, [(prompt, params)])
    assert got == searched(reference, (prompt, params))
    assert got[:3] == ids[:3]
    assert got[3] != ids[3]


def test_a_bad_word_that_alone_is_allowed_is_sampled(engine: Engine) -> None:
    params = SamplingParams(max_tokens=3, allowed_token_ids=(7,), bad_words_ids=((7,),))
    assert drive(engine, [([1, 2], params)]) == [[7, 7, 7]]


def test_penalties_follow_the_sign_of_a_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seen token becomes less likely whatever its sign. Token 0 pads shorter rows, and is not
    seen for that. Two of the three rows are counted at once."""
    monkeypatch.setattr(logit_options, "ROWS_AT_ONCE", 2)
    plan = make_plan(3, [], last_samples=True)
    penalty = SamplingParams(repetition_penalty=2.0, max_tokens=8)
    plan.begins = [(table_idx, penalty) for table_idx in plan.table_idxs]
    plan.option_rows, plan.output_idxs = [0, 1, 2], [0, 0, 0]
    prompts = [[1, 2, 2, 1], [3], [0]]
    plan.histories = [
        (table_idx, len(ids), (), ids_to_bytes(ids))
        for table_idx, ids in zip(plan.table_idxs, prompts, strict=True)
    ]
    options = LogitOptions(torch.device("cpu"), MAX_RUNNING, vocab_size=4)
    options.begin(plan)
    logits = torch.tensor([[4.0, 4.0, -4.0, -4.0]] * 3)
    penalised = options.apply(logits, plan).tolist()
    assert penalised == [[4, 2, -8, -4], [4, 4, -4, -8], [2, 4, -4, -4]]


def test_no_stop_token_before_min_tokens(engine: Engine) -> None:
    prompt = prompts(1)[0]
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    (ids,) = drive(engine, [(prompt, plain)])
    stop = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(ids[0],))
    assert drive(engine, [(prompt, stop)]) == [ids[:1]]
    later = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        stop_token_ids=(ids[0],),
        min_tokens=5,
        logit_bias={ids[0]: 100.0},  # it is sampled as soon as it may
    )
    (longer,) = drive(engine, [(prompt, later)])
    assert longer.index(ids[0]) == 5
    assert len(longer) == 6


def test_a_grammar_may_leave_only_a_stop_token_before_min_tokens() -> None:
    """Else no token is left, the request fails, and the requests beside it are computed again."""
    plan = make_plan(1, [], last_samples=True)
    params = SamplingParams(stop_token_ids=(3,), min_tokens=5, bad_words_ids=((2,),))
    params = msgspec.structs.replace(params, max_tokens=9)
    plan.begins, plan.option_rows, plan.output_idxs = [(plan.table_idxs[0], params)], [0], [0]
    plan.histories = [(plan.table_idxs[0], 1, (3,), ids_to_bytes([1]))]
    options = LogitOptions(torch.device("cpu"), MAX_RUNNING, vocab_size=4)
    options.begin(plan)
    (logits,) = options.apply(torch.tensor([[0.0, 1.0, 9.0, 9.0]]), plan)
    assert logits.isfinite().all()
    assert logits.argsort().tolist() == [3, 2, 0, 1]


def test_an_end_of_sequence_that_the_model_lacks_is_left_out(engine: Engine) -> None:
    """Else `min_tokens` would write beyond the logits, and the step would fail."""
    config = scheduler_config(RuntimeArgs(offline=True), engine, frozenset((3, VOCAB)))
    assert config.eos_ids == {3}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids"),
        (
            {"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 1},
            "allowed_token_ids",
        ),
        ({"min_tokens": 100_000}, "min_tokens"),
    ],
)
def test_refusals(engine: Engine, options: dict[str, Any], param: str) -> None:
    sampling = SamplingParams(**options)
    message = UserMsg(uid=0, ids=ids_to_bytes([1, 2]), sampling=sampling)
    answer = make_scheduler(engine).add(message)
    assert isinstance(answer, Failed)
    assert (answer.param, answer.status) == (param, 400)


def test_seeded_rows_are_their_own(engine: Engine) -> None:
    """With penalties a seed gives the same text alone and beside others."""

    def drawn(seed: int) -> Request:
        params = SamplingParams(
            seed=seed, max_tokens=NUM_TOKENS, top_p=0.95, presence_penalty=0.5, logprobs=True
        )
        return prompts(1)[0], params

    alone = drive(engine, [drawn(7)])[0]
    together = drive(engine, [*requests()[:3], drawn(7), *requests()[3:]])
    assert together[3] == alone


def test_a_step_without_options_uploads_what_it_did(engine: Engine) -> None:
    plan = make_plan(3, [], last_samples=True)
    without = arrays_of(plan, None)
    plan.option_rows = [1]
    with_options = arrays_of(plan, None)
    assert without.keys() == with_options.keys()
