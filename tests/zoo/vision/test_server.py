"""A server whose clients send pictures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.pictures import PICTURES, Sample, chat, data_url, image_part, text_part
from helpers.running_server import RunningServer

OPTIONS = ("--dtype", "float32", "--num-pages", "256", "--page-size", "4", "--log-requests")


@pytest.fixture(scope="module")
def server(mistral3: Sample) -> Iterator[RunningServer]:
    with RunningServer("--model", str(mistral3.folder), *OPTIONS) as server:
        server.url  # noqa: B018 (waits until it serves)
        yield server


def test_a_chat_about_pictures_in_two_turns(server: RunningServer) -> None:
    client = server.client()
    messages: list[Any] = chat(*PICTURES[:2])
    options: dict[str, Any] = {"model": "model", "max_tokens": 5, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **options)
    assert first.usage
    assert first.usage.prompt_tokens > 40
    again = [
        *messages,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    chunks = client.chat.completions.create(
        messages=again, stream=True, stream_options={"include_usage": True}, **options
    )
    usage = [chunk.usage for chunk in chunks if chunk.usage][-1]
    assert usage.prompt_tokens_details
    assert usage.prompt_tokens_details.cached_tokens > 40


def test_a_bad_picture_is_a_400_by_its_name(server: RunningServer) -> None:
    parts = [text_part("a"), image_part("data:image/png;base64,aGVsbG8=")]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    start = time.perf_counter()
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert time.perf_counter() - start < 10  # the machine may be busy
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1]"
    assert "none of PNG, JPEG, WEBP, GIF" in error["message"]


def test_prompt_ids_are_those_of_the_model(server: RunningServer) -> None:
    body = {"messages": chat(PICTURES[0]), "max_tokens": 2, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    ids = answer["prompt_token_ids"]
    assert len(ids) == answer["usage"]["prompt_tokens"]
    assert max(ids) < 2**20


def test_a_picture_in_a_text_model_is_refused() -> None:
    with RunningServer("--num-pages", "16") as server:
        parts = [image_part(data_url(PICTURES[0]))]
        body = {"messages": [{"role": "user", "content": parts}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert "this model reads text only, got 'image_url'" in answer.text
