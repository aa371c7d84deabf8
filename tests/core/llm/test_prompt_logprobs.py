"""`prompt_logprobs`, `echo` and `max_tokens=0` of `LLM`, with the built-in model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl import LLM, Delta, RequestOutput, SamplingParams
from minisgl.errors import InvalidSampling, PromptTooLong

TEXT = "Once upon a time, 二 🦜 and"
ALONE = SamplingParams(max_tokens=0, prompt_logprobs=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, num_pages=512, dtype="float32") as llm:
        yield llm


def test_a_prompt_alone(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, ALONE)
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert output.num_output_tokens == 0
    ids = llm.tokenizer.encode(TEXT, add_special_tokens=True)
    assert output.num_prompt_tokens == len(ids)
    assert output.prompt_logprobs
    assert output.prompt_top_logprobs
    first, *rest = output.prompt_logprobs
    assert first is None
    assert output.prompt_top_logprobs[0] == {}
    assert len(rest) == len(ids) - 1
    for id, logprob, top in zip(ids[1:], rest, output.prompt_top_logprobs[1:], strict=True):
        assert len(top) == 2
        assert top.get(id, logprob) == logprob
        assert logprob is not None
        assert logprob <= max(top.values())


def test_an_answer_as_a_prompt_has_the_same_logprobs(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(TEXT, add_special_tokens=True)
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=True, ignore_eos=True)
    (answer,) = llm.generate([prompt], params)
    (again,) = llm.generate([prompt + answer.token_ids], ALONE)
    assert again.num_cached_tokens == 0
    assert again.prompt_logprobs
    got = again.prompt_logprobs[len(prompt) :]
    assert got == pytest.approx(answer.logprobs, abs=1e-4)


def test_echo(llm: LLM) -> None:
    (plain,) = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=8))
    (echoed,) = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=8, echo=True))
    assert echoed.text == TEXT + plain.text
    assert (echoed.token_ids, echoed.prompt_logprobs) == (plain.token_ids, None)
    (alone,) = llm.generate(TEXT, SamplingParams(max_tokens=0, echo=True))
    assert (alone.text, alone.token_ids) == (TEXT, [])
    stop = plain.text[3:5]
    params = SamplingParams(temperature=0.0, max_tokens=8, echo=True, stop=(stop, "upon"))
    (stopped,) = llm.generate(TEXT, params)
    assert (stopped.text, stopped.stop_match) == (TEXT + plain.text[:3], stop)


def test_a_stream_has_the_prompt_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, logprobs=True)
    *deltas, output = llm.stream(TEXT, params)
    assert isinstance(output, RequestOutput)
    assert isinstance(deltas[0], Delta)
    assert deltas[0].prompt_logprobs == output.prompt_logprobs
    assert output.prompt_top_logprobs is None
    assert [getattr(delta, "prompt_logprobs", 0) for delta in deltas[1:]] == [None] * (
        len(deltas) - 1
    )


def test_an_answer_without_tokens_has_the_lists_that_were_asked_for(llm: LLM) -> None:
    (plain,) = llm.generate(TEXT, ALONE)
    assert (plain.logprobs, plain.top_logprobs) == (None, None)
    (output,) = llm.generate(TEXT, ALONE.but(logprobs=True))
    assert (output.logprobs, output.top_logprobs) == ([], None)
    *_, last = llm.stream(TEXT, ALONE.but(logprobs=True, top_logprobs=1))
    assert isinstance(last, RequestOutput)
    assert (last.logprobs, last.top_logprobs) == ([], [])


def test_one_token(llm: LLM) -> None:
    (output,) = llm.generate([[5]], ALONE)
    assert (output.prompt_logprobs, output.prompt_top_logprobs) == ([None], [{}])


def test_wrong_arguments_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidSampling, match="prompt_logprobs must be from 0 to 20, got 21"):
        SamplingParams(prompt_logprobs=21)
    with pytest.raises(InvalidSampling, match="prompt_logprobs must be a whole number"):
        SamplingParams(prompt_logprobs=True)
    with pytest.raises(InvalidSampling, match="0 is allowed with echo or prompt_logprobs"):
        SamplingParams(max_tokens=0)
    with pytest.raises(PromptTooLong, match="maximum context length is 2048"):
        llm.generate([[1] * 100_000], ALONE)
