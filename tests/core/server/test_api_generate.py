"""POST /generate: texts, ids and messages, whole and as a stream."""

from __future__ import annotations

import httpx

from helpers.api_requests import events
from helpers.scripted_server import ScriptedServer
from minisgl.message import TextPrompt
from minisgl.server.observe import Observer


def test_generate(http: httpx.Client, server: ScriptedServer) -> None:
    answer = http.post("/generate", json={"text": "one three", "temperature": 0}).json()
    assert answer == {
        "text": "one three .",
        "token_ids": [3, 5, 0],
        "finish_reason": "stop",
        "stop_match": None,
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "timings": {
            "queued_s": 0.25,
            "prefill_s": 0.5,
            "decode_s": 1.0,
            "num_cached_tokens": 1,
            "num_chunks": 3,
            "prefix_differs_at": None,
            "num_retractions": 1,
            "num_drafted": 0,
            "num_accepted": 0,
        },
    }
    assert server.received[-1].sampling.temperature == 0
    assert isinstance(server.received[-1].prompt, TextPrompt)
    data = events(http.post("/generate", json={"input_ids": [5, 6], "stream": True}))
    assert data[0] == {"text": "5 ", "token_ids": [1]}
    assert data[-3] == {"text": ".", "token_ids": [0]}
    assert (data[-2]["text"], data[-2]["finish_reason"], data[-1]) == ("", "stop", "[DONE]")


def test_generate_with_logprobs(http: httpx.Client, server: ScriptedServer) -> None:
    request = {"text": "one three", "logprobs": True}
    answer = http.post("/generate", json=request).json()
    assert (answer["token_ids"], answer["logprobs"]) == ([3, 5, 0], [-1.5, -2.5, 0.0])
    *chunks, end, _ = events(http.post("/generate", json=request | {"stream": True}))
    assert [chunk["logprobs"] for chunk in chunks] == [[-1.5], [-2.5], [0.0]]
    assert (end["token_ids"], end["logprobs"]) == ([], [])
    assert server.received[-1].sampling.logprobs
    assert "logprobs" not in http.post("/generate", json={"text": "one"}).json()
    chatted = http.post("/generate", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chatted.json()["text"] == "hi ."


def test_an_error_within_a_stream_is_counted() -> None:
    observer = Observer()
    with ScriptedServer(observer=observer) as server:
        body = {"text": "one !fail", "stream": True}
        assert "out of luck" in httpx.post(f"{server.url}/generate", json=body).text
    assert observer.errors == {"engine_error": 1}
