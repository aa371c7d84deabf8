"""`structured_outputs` of `LLM`: answers follow it whatever else is in the batch.

Penalties are beside them: both need what the steps before have sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from helpers.json_schemas import INTEGER, TEXT, closed, listed
from minisgl.core import Plan
from minisgl.errors import InvalidSampling
from minisgl.llm import LLM, SamplingParams
from minisgl.llm.engines import OwnEngine
from minisgl.llm.output import RequestOutput

OPTIONS: dict[str, Any] = {"dtype": "float32", "page_size": 4, "progress": False}
SCHEMA = closed(name=TEXT, numbers=listed(INTEGER, 1, 4), answer=closed(value=INTEGER))
PLAIN = SamplingParams(temperature=0.8, seed=1, max_tokens=40)
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": r"\d{3}-[a-z]{2,9}"},
    {"choice": ["yes", "no"]},
    {"json": {"enum": ["red", 3, None]}},
    {"grammar": 'root ::= "sum: " [0-9] [0-9]? "!"'},
]
PARAMS = [
    msgspec.structs.replace(PLAIN, max_tokens=100, seed=seed, structured_outputs=form)
    for seed, form in enumerate(FORMS)
]
PARAMS += [
    msgspec.structs.replace(
        PLAIN, repetition_penalty=1.3, presence_penalty=0.5, bad_words=("the",)
    ),
    msgspec.structs.replace(PARAMS[0], frequency_penalty=0.8, repetition_penalty=1.2, seed=9),
]
PROMPTS = [f"What is {number} + {number}?" for number in range(len(PARAMS))]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_pages=3000, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[str]:
    return [
        llm.generate(prompt, params)[0].text for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def test_answers_follow_their_form(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert {output.finish_reason for output in outputs[: len(FORMS)]} == {"stop"}
    jsonschema.validate(json.loads(outputs[0].text), SCHEMA)
    assert re.fullmatch(r"\d{3}-[a-z]{2,9}", outputs[1].text)
    assert outputs[2].text in ("yes", "no")
    assert json.loads(outputs[3].text) in ("red", 3, None)
    assert re.fullmatch(r"sum: [0-9]{1,2}!", outputs[4].text)


def test_json_object(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, structured_outputs={"json_object": True})
    (output,) = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], params)
    assert isinstance(json.loads(output.text), dict)


def test_alone_and_in_a_batch_of_64(
    llm: LLM, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests, with and without a form, change neither these nor one another."""
    plain = llm.generate("Tell me a story", PLAIN)[0].text
    assert isinstance(llm._engine, OwnEngine)
    engine, num_rows = llm._engine.engine, list[int]()
    launch = engine.launch

    def counted(plan: Plan) -> Any:
        num_rows.append(plan.num_rows)
        return launch(plan)

    monkeypatch.setattr(engine, "launch", counted)
    outputs = llm.generate([*PROMPTS, "Tell me a story"] * 8, [*PARAMS, PLAIN] * 8)
    assert max(num_rows) > 32, "a request starts when its grammar is compiled; most overlap"
    assert texts(outputs) == [*alone, plain] * 8


def test_retracted_requests(alone: list[str]) -> None:
    with LLM(num_pages=32, max_seq_len=120, **OPTIONS) as llm:
        assert texts(llm.generate(PROMPTS * 4, PARAMS * 4)) == alone * 4
        assert isinstance(llm._engine, OwnEngine)
        assert llm._engine.scheduler.stats.num_retractions > 0


def test_without_overlap(alone: list[str], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", "1")
    assert texts(llm.generate(PROMPTS, PARAMS)) == alone


def test_penalties_and_logprobs_beside_a_form(llm: LLM) -> None:
    params = msgspec.structs.replace(
        PARAMS[0], repetition_penalty=1.5, logit_bias={5: 3.0}, logprobs=True
    )
    (output,) = llm.generate(PROMPTS[0], params)
    jsonschema.validate(json.loads(output.text), SCHEMA)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)


def test_a_cut_answer_is_the_start_of_a_valid_one(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], PARAMS[0])[0]
    (cut,) = llm.generate(PROMPTS[0], msgspec.structs.replace(PARAMS[0], max_tokens=9))
    assert cut.finish_reason == "length"
    assert cut.token_ids == whole.token_ids[:9]


def test_a_refusal_names_the_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidSampling, match=r"^prompt 1: structured_outputs\.regex cannot be"):
        llm.generate(["a", "b"], [PLAIN, SamplingParams(structured_outputs={"regex": "(("})])


def test_a_grammar_that_becomes_too_much_work_ends_only_its_answer(
    llm: LLM, alone: list[str]
) -> None:
    heavy = SamplingParams(structured_outputs={"regex": "(a?){5000}a{5000}"}, max_tokens=20)
    cut, plain = llm.generate(["a", "b"], [heavy, PLAIN])
    assert (cut.text, cut.finish_reason) == ("a", "length")
    assert len(cut.token_ids) == 1
    assert plain.text == llm.generate("b", PLAIN)[0].text
    assert llm.generate(PROMPTS[0], PARAMS[0])[0].text == alone[0]
