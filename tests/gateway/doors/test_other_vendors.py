"""The API families of other vendors on a whole server with the built-in model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import pytest

from helpers.running_server import RunningServer
from minisgl.server.model import BUILTIN_NAME as MODEL


@pytest.fixture(scope="module")
def claude(builtin: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=builtin.url, api_key="none", max_retries=0) as client:
        yield client


def asked(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"model": MODEL, "messages": messages, **fields}


GREEDY: Any = {"extra_body": {"temperature": 0.0}}


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_messages(claude: anthropic.Anthropic) -> None:
    question = asked("What is 12 + 30?", system="Be brief.")
    message = claude.messages.create(**question, max_tokens=40, **GREEDY)
    usage = message.usage
    num_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert num_prompt == claude.messages.count_tokens(**question).input_tokens
    with claude.messages.stream(**question, max_tokens=40, **GREEDY) as stream:
        assert "".join(stream.text_stream) == text_of(message)
        assert stream.get_final_message().stop_reason == message.stop_reason


def test_a_begun_answer_is_continued(claude: anthropic.Anthropic) -> None:
    whole = text_of(claude.messages.create(**asked("Count to five."), max_tokens=30, **GREEDY))
    begun = whole[: whole.index(" ", 3)]
    rest = claude.messages.create(**asked("Count to five.", begun), max_tokens=30, **GREEDY)
    assert (begun + text_of(rest)).startswith(whole)


def test_max_tokens_beyond_the_context_are_lowered(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        **asked("Count to a thousand."),
        max_tokens=20_000,
        extra_body={"temperature": 0.0, "top_k": 1},
    )
    assert message.stop_reason in ("end_turn", "model_context_window_exceeded")


def test_responses(builtin: RunningServer) -> None:
    with builtin.client() as client:
        greedy: Any = {"model": MODEL, "temperature": 0.0, "max_output_tokens": 30}
        first = client.responses.create(input="What is 12 + 30?", **greedy)
        second = client.responses.create(
            input="And 2 more?", previous_response_id=first.id, **greedy
        )
        whole = client.chat.completions.create(
            model=MODEL,
            temperature=0.0,
            max_tokens=30,
            messages=[
                {"role": "user", "content": "What is 12 + 30?"},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "And 2 more?"},
            ],
        )
        assert second.output_text == whole.choices[0].message.content
        with client.responses.stream(input="What is 12 + 30?", **greedy) as stream:
            assert stream.get_final_response().output_text == first.output_text


def test_tokens(builtin: RunningServer) -> None:
    with httpx.Client(base_url=builtin.url) as http:
        text = "Hé 42 \U0001f600"
        encoded = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert encoded["count"] == len(encoded["tokens"]) == len(encoded["token_strs"])
        assert encoded["max_model_len"] == 2048
        assert http.post("/detokenize", json={"tokens": encoded["tokens"]}).json()["prompt"] == text
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        ids = http.post("/tokenize", json=chat).json()["tokens"]
        shown = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert shown == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        refused = http.post("/detokenize", json={"tokens": [5, 99_999]})
        assert refused.status_code == 400
        assert "must be token ids between 0 and 1407, got 99999" in refused.text
        [entry] = http.get("/v1/models").json()["data"]
        assert entry["context_length"] == 2048


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "parameters"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305"}]}, "input_schema"),
    ],
)
def test_the_wrong_schema_of_a_tool_is_named_by_its_tool(
    builtin: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    """A hosted tool before it is left out, which moves the others."""
    tool = {"type": "function" if param == "parameters" else "custom", "name": "f"}
    hosted = [{"name": "web_search", **body["tools"][0]}]
    chat = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    base = body if path == "/v1/responses" else chat
    tools = [*hosted, {**tool, param: {"type": "string"}}]
    error = httpx.post(builtin.url + path, json={**base, "tools": tools}).json()["error"]
    assert error["message"] == f"tools.f.{param} must be the schema of an object"


def test_ollamas_think_is_named_as_it_was_sent(builtin: RunningServer) -> None:
    """The built-in model has no reasoning: an effort is refused, a switch left out."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "stream": False}
    refused = httpx.post(f"{builtin.url}/api/chat", json=chat | {"think": "high"})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("think: the chat template of this model reads no")
    answer = httpx.post(f"{builtin.url}/api/chat", json=chat | {"think": True})
    assert answer.headers["x-minisgl-warning"] == "left out: think"


def test_a_chat_that_is_only_counted_and_too_long(builtin: RunningServer) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "ab " * 30_000}]}
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        assert httpx.post(builtin.url + path, json=chat).json()["error"]["param"] == "messages"


def test_ollama(builtin: RunningServer) -> None:
    with ollama.Client(host=builtin.url) as llama, builtin.client() as client:
        question: Any = [{"role": "user", "content": "What is 12 + 30?"}]
        options = {"temperature": 0.0, "num_predict": 30}
        whole = llama.chat(MODEL, question, options=options).message.content
        parts = llama.chat(MODEL, question, options=options, stream=True)
        assert "".join(part.message.content or "" for part in parts) == whole
        same = client.chat.completions.create(
            model=MODEL, messages=question, temperature=0.0, max_tokens=30
        )
        assert same.choices[0].message.content == whole
        told = llama.chat(MODEL, question, format="json", options=options | {"num_predict": 200})
        json.loads(told.message.content or "")
