"""Fields and answers that clients of vLLM, SGLang, llama.cpp and mini-sglang know."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from helpers.api_requests import CHAT, TEXT, chat, events, refused
from helpers.scripted_server import MODEL
from minisgl.message import TokenText
from minisgl.server.api.logprobs import TextLogprobs


@pytest.mark.parametrize("stop", ["two", None])
def test_stop_reason_is_the_stop_string_that_ended_the_answer(
    client: openai.OpenAI, http: httpx.Client, stop: str | None
) -> None:
    whole = client.chat.completions.create(**chat("one two"), stop=stop).choices[0]
    assert whole.model_extra == {"stop_reason": stop}
    text = client.completions.create(model=MODEL, prompt="one two", stop=stop).choices[0]
    assert text.model_extra == {"stop_reason": stop}
    for path, body in ((CHAT, chat("one two")), (TEXT, {"prompt": "one two"})):
        chunks = events(http.post(path, json=body | {"stop": stop, "stream": True}))[:-1]
        choices: list[dict[str, Any]] = [chunk["choices"][0] for chunk in chunks]
        assert all("stop_reason" not in choice for choice in choices[:-1])
        assert choices[-1]["stop_reason"] == stop


def test_the_likeliest_tokens_of_a_text_have_the_sampled_one_too() -> None:
    token = TokenText(data=b"b", offset=0, top=[(1, b"a", -0.5)])
    assert TextLogprobs.of([token], [-3.0]).top_logprobs == [{"a": -0.5, "b": -3.0}]


def test_what_responses_cannot_do_is_a_404_that_says_so(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    with pytest.raises(openai.NotFoundError, match="not supported here: /tokenize"):
        client.responses.input_tokens.count(model=MODEL, input="a")
    error = refused(http.post("/v1/responses/compact", json={"input": "a"}), 404)
    assert "/v1/responses/compact is not supported here" in error["message"]
    assert "/tokenize" in error["message"]
