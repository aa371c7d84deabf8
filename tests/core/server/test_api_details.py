"""What OpenAI's answers have besides text: log-probabilities, ids, choices, timings."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from helpers.api_requests import chat, events
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.core import Finished
from minisgl.message import TextReply, TokenText
from minisgl.server.api.answers import PromptTokensDetails, TextLogprobs, Usage
from minisgl.server.api.chat import ChatRequest, _ChatShape
from minisgl.server.api.messages import Message


def test_chat_logprobs(client: openai.OpenAI, server: ScriptedServer) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**chat("one three"), **options)
    assert (server.received[-1].sampling.logprobs, server.received[-1].sampling.top_logprobs) == (
        True,
        2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert [entry.token for entry in logprobs.content] == ["one", "three", "."]
    assert [entry.logprob for entry in logprobs.content] == [-1.5, -2.5, 0.0]
    assert bytes(logprobs.content[1].bytes or []) == b"three"
    top = logprobs.content[0].top_logprobs
    assert [(entry.token, entry.logprob) for entry in top] == [
        ("one", -0.25),
        ("bytes:\\xe4\\xb8", -2.0),
    ]
    assert top[1].bytes == [0xE4, 0xB8]
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**chat("one three"), **options, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == logprobs.content
    assert client.chat.completions.create(**chat("one")).choices[0].logprobs is None


def test_text_logprobs(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": ["one three", "two"], "logprobs": 2}
    answer = client.completions.create(**request)
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.tokens == ["one", "three", "."]
    assert logprobs.token_logprobs == [-1.5, -2.5, 0.0]
    assert logprobs.text_offset == [3, 5, 1]
    assert logprobs.top_logprobs
    assert logprobs.top_logprobs[0] == {"one": -0.25, "bytes:\\xe4\\xb8": -2.0}
    tokens: list[list[str]] = [[], []]
    for chunk in client.completions.create(**request, stream=True):
        if found := chunk.choices[0].logprobs:
            tokens[chunk.choices[0].index] += found.tokens or []
    assert tokens == [["one", "three", "."], ["two", "."]]
    none = client.completions.create(**request | {"logprobs": 0}).choices[0].logprobs
    assert none
    assert none.top_logprobs == [{"one": -1.5}, {"three": -2.5}, {".": 0.0}]


def test_of_two_tokens_with_one_text_the_likeliest_counts() -> None:
    token = TokenText(data=b"a", offset=0, top=[(1, b"a", -0.5), (2, b"a", -3.0)])
    assert TextLogprobs.of([token], [-0.5]).top_logprobs == [{"a": -0.5}]


def test_token_ids_of_each_choice(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/chat/completions", chat("one three")),
        ("/v1/completions", {"prompt": "one three"}),
    ):
        asked = body | {"return_token_ids": True}
        assert http.post(path, json=asked).json()["choices"][0]["token_ids"] == [3, 5, 0]
        streamed = events(http.post(path, json=asked | {"stream": True}))[:-1]
        assert [chunk for chunk in streamed if "prompt_token_ids" in str(chunk)] == streamed[:1]
        ids = [chunk["choices"][0].get("token_ids", []) for chunk in streamed]
        assert [token for part in ids for token in part] == [3, 5, 0]
        assert "token_ids" not in http.post(path, json=body).json()["choices"][0]


def test_of_several_deltas_the_first_has_the_details() -> None:
    asked = ChatRequest(messages=[Message(role="user", content="a")], logprobs=True)
    reply = TextReply(
        uid=0, text="yes", token_ids=[1, 2], parts=[("reasoning", "hm"), ("content", "yes")],
        logprobs=[-1.0, -2.0], tokens=[TokenText(data=b"a", offset=0)] * 2,
    )  # fmt: skip
    first, second = _ChatShape("m", asked).text(0, reply).split(b"\n\n")[:2]
    assert (first.count(b'"top_logprobs"'), second.count(b'"top_logprobs"')) == (2, 0)


def test_choices_of_a_chat(client: openai.OpenAI, server: ScriptedServer) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 2**64 - 2}
    answer = client.chat.completions.create(**chat("one two"), **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["one two ."] * 3
    seeds = [message.sampling.seed for message in server.received[-3:]]
    assert seeds == [2**64 - 2, 2**64 - 1, 0]
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    texts, roles, reasons = [""] * 3, [0] * 3, [""] * 3
    stream = client.chat.completions.create(
        **chat("one two"), **options, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = list(stream)
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert (texts, roles, reasons) == (["one two ."] * 3, [1] * 3, ["stop"] * 3)
    assert usage.usage == answer.usage
    client.chat.completions.create(**chat("one"), n=2)
    assert server.received[-1].sampling.seed != server.received[-2].sampling.seed


def test_choices_of_several_prompts(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": ["a b", "c"], "n": 2, "best_of": 2}
    answer = client.completions.create(**request)
    assert [choice.text for choice in answer.choices] == ["a b .", "a b .", "c .", "c ."]
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    texts = [""] * 4
    for chunk in client.completions.create(**request, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt=["!hang", "!refuse"], n=2)
    assert raised.value.param == "prompt[1]"
    with pytest.raises(openai.BadRequestError, match="best_of must equal n, which is 1"):
        client.completions.create(model=MODEL, prompt="a", best_of=2)
    with pytest.raises(openai.BadRequestError, match="at most 1024 choices"):
        client.completions.create(model=MODEL, prompt=["a"] * 600, n=2)


def test_timings_beside_usage(client: openai.OpenAI) -> None:
    """The official client keeps `timings`, which OpenAI's answers do not have."""
    timings = {"queued_s": 0.25, "prefill_s": 0.5, "decode_s": 1.0}
    timings |= {"num_cached_tokens": 1, "num_chunks": 3, "num_retractions": 1}
    timings |= {"num_drafted": 0, "num_accepted": 0}
    timings |= {"prefix_differs_at": None}
    assert client.chat.completions.create(**chat("one two")).model_extra == {"timings": timings}
    both = client.completions.create(model=MODEL, prompt=["one two", "three"])
    assert both.model_extra == {"timings": timings | {"num_chunks": 6, "num_retractions": 2}}
    for options in ({}, {"include_usage": True}):
        streams: list[Any] = [
            client.chat.completions.create(
                **chat("one two"), stream=True, stream_options=options or openai.omit
            ),
            client.completions.create(
                model=MODEL, prompt="one two", stream=True, stream_options=options or openai.omit
            ),
        ]
        for stream in streams:
            told = [chunk.model_extra.get("timings") for chunk in stream]
            last = [timings] * (2 if options else 1)
            assert told == [None] * (len(told) - len(last)) + last


def test_a_prompt_counts_once_for_all_of_its_choices() -> None:
    """Two prompts with two choices each."""
    ends = [
        Finished(
            uid=uid,
            reason="stop",
            num_prompt_tokens=10,
            num_output_tokens=2,
            num_cached_tokens=num_cached,
        )
        for uid, num_cached in enumerate((8, 0, 4, 6))
    ]
    usage = Usage.of(ends, num_choices=2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 8, 28)
    assert usage.prompt_tokens_details == PromptTokensDetails(cached_tokens=0 + 4)
