"""`bad_words` of `LLM`, with the built-in model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import InvalidSampling
from minisgl.tokenizer import Encoded

ASK = [{"role": "user", "content": "What is a radix cache?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, num_pages=128) as llm:
        yield llm


def test_words_of_the_answer_are_gone(llm: LLM) -> None:
    (plain,) = llm.chat(ASK, SamplingParams(temperature=0.0, max_tokens=30))
    words = [word for word in plain.text.split() if word.isalpha()][1:4]
    assert len(words) == 3
    params = SamplingParams(temperature=0.0, max_tokens=30, bad_words=tuple(words))
    (output,) = llm.chat(ASK, params)
    assert output.text
    assert not set(words) & set(output.text.split())


def test_both_forms_of_a_word_are_forbidden(llm: LLM) -> None:
    sampling = llm._encoder.request(
        Encoded(b"\1\0\0\0"), SamplingParams(bad_words=("the",)), ""
    ).sampling
    texts = {llm.tokenizer.decode(list(ids)) for ids in sampling.bad_words_ids}
    assert texts == {"the", " the"}
    assert sampling.bad_words == ()


@pytest.mark.needs("minisgl_zoo")
def test_a_grammar_has_precedence_over_bad_words(llm: LLM) -> None:
    form = {"choice": ["yes"]}
    params = SamplingParams(max_tokens=9, bad_words=("yes", "y"), structured_outputs=form)
    (output,) = llm.chat(ASK, params)
    assert output.text == "yes"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"bad_words": "no"}, "bad_words must be a tuple"),
        ({"bad_words": ("",)}, "bad_words must be a tuple"),
        ({"bad_words": ("\ud800",)}, "valid Unicode"),
        ({"bad_words_ids": ((),)}, "bad_words_ids must be a tuple"),
        ({"bad_words_ids": ((-1,),)}, "bad_words_ids must be a tuple"),
        ({"bad_words_ids": (5,)}, "bad_words_ids must be a tuple"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidSampling, match=match):
        SamplingParams(**given)


def test_ids_beyond_the_vocabulary(llm: LLM) -> None:
    with pytest.raises(Exception, match="bad_words_ids must have token ids between 0 and"):
        llm.chat(ASK, SamplingParams(bad_words_ids=((10**6,),)))
