"""Requests of lm-evaluation-harness for multiple choice, against transformers' log-likelihoods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.running_server import RunningServer
from minisgl.builtin import model_path

PROMPTS = [[5, 6, 7, 8, 300, 20], list(range(40, 90)), [9]]


@pytest.fixture(scope="module")
def http(pooled: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pooled.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_path(), dtype="float32")
    return model.eval()


def asked(**fields: Any) -> dict[str, Any]:
    """The body that `lm_eval.models.openai_completions` makes."""
    return {
        "model": "minisgl-builtin",
        "prompt": PROMPTS,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        **fields,
    }


def logprobs_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_logprobs(http: httpx.Client, model: PreTrainedModel, max_tokens: int) -> None:
    answer = post(http, "/v1/completions", asked(max_tokens=max_tokens))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["usage"]["completion_tokens"] == max_tokens * len(PROMPTS)
    for ids, choice in zip(PROMPTS, answer["choices"], strict=True):
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {len(ids) + max_tokens}
        assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
        want = logprobs_of(model, ids)
        got = lists["token_logprobs"][1 : len(ids)]
        chosen = want[torch.arange(len(ids) - 1), ids[1:]].tolist()
        assert got == pytest.approx(chosen, abs=1e-4)
        tops = lists["top_logprobs"][1 : len(ids)]
        best = want[:-1].max(-1).values.tolist()
        assert [max(top.values()) for top in tops] == pytest.approx(best, abs=1e-4)
        is_best = [token == id for token, id in zip(want[:-1].argmax(-1), ids[1:], strict=True)]
        # The harness compares the two numbers, so they must be the same to the last bit.
        assert [a == max(b.values()) for a, b in zip(got, tops, strict=True)] == is_best
        tokens = lists["tokens"]
        if not any(token.startswith("bytes:") for token in tokens):
            assert choice["text"].startswith("".join(tokens[: len(ids)]))


def test_streams_and_choices(http: httpx.Client) -> None:
    whole = post(http, "/v1/completions", asked(prompt="Once upon a time", max_tokens=4, n=2))
    body = asked(prompt="Once upon a time", max_tokens=4, n=2, stream=True)
    texts, logprobs = ["", ""], [[], []]
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                if choice["logprobs"]:
                    logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    for (first, *rest), choice in zip(logprobs, whole["choices"], strict=True):
        # Whether the choices' prompts share a step depends on when they arrive.
        expected = choice["logprobs"]["token_logprobs"]
        assert first is expected[0] is None
        assert rest == pytest.approx(expected[1:], abs=1e-4)
    assert all(text.startswith("Once upon a time") for text in texts)


def test_prompt_logprobs_of_generate(http: httpx.Client, model: PreTrainedModel) -> None:
    ids = PROMPTS[1]
    body = {"input_ids": ids, "max_tokens": 0, "prompt_logprobs": 3}
    answer = post(http, "/generate", body)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("", [], "length")
    first, *rest = answer["prompt_logprobs"]
    assert first == {"id": ids[0], "logprob": None, "top": []}
    assert [entry["id"] for entry in rest] == ids[1:]
    want = logprobs_of(model, ids)
    chosen = want[torch.arange(len(ids) - 1), ids[1:]].tolist()
    assert [entry["logprob"] for entry in rest] == pytest.approx(chosen, abs=1e-4)
    top_ids = want[:-1].topk(3).indices.tolist()
    assert [[top["id"] for top in entry["top"]] for entry in rest] == top_ids


def test_prompt_logprobs_of_a_chat(http: httpx.Client, model: PreTrainedModel) -> None:
    chat = {"messages": [{"role": "user", "content": "Once upon"}]}
    ids = post(http, "/tokenize", chat)["tokens"]
    body = {**chat, "max_tokens": 3, "n": 2, "temperature": 0, "prompt_logprobs": 1}
    answer = post(http, "/v1/chat/completions", body)
    first, *rest = answer["prompt_logprobs"]
    assert first == {"id": ids[0], "logprob": None, "top": []}
    assert [entry["id"] for entry in rest] == ids[1:]
    chosen = logprobs_of(model, ids)[torch.arange(len(ids) - 1), ids[1:]].tolist()
    assert [entry["logprob"] for entry in rest] == pytest.approx(chosen, abs=1e-4)
    found, texts = [], ["", ""]
    with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                found += chunk.get("prompt_logprobs", [])
                [choice] = chunk["choices"]
                texts[choice["index"]] += choice["delta"].get("content") or ""
    # Both choices may share a step or not, and another number of rows rounds in another way.
    assert [entry["id"] for entry in found] == ids
    assert [entry["logprob"] for entry in found[1:]] == pytest.approx(chosen, abs=1e-4)
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]


def test_choices_of_generate(http: httpx.Client) -> None:
    body = {"text": "Once upon", "max_tokens": 4, "seed": 5, "temperature": 1}
    answer = post(http, "/generate", body | {"n": 3})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 12
    for index, choice in enumerate(answer["choices"]):
        single = post(http, "/generate", body | {"seed": 5 + index})
        assert "index" not in single
        assert choice["token_ids"] == single["token_ids"]
    texts = ["", "", ""]
    with http.stream("POST", "/generate", json=body | {"n": 3, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                texts[chunk["index"]] += chunk["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


def test_max_tokens_0_needs_output_of_the_prompt(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
        ("/generate", {"text": "a", "max_tokens": 0}),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    echoed = post(http, "/v1/completions", {"prompt": "a b", "max_tokens": 0, "echo": True})
    assert echoed["choices"][0]["text"] == "a b"
