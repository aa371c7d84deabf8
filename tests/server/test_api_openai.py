"""The OpenAI families as the official client sees them, over a scripted pipeline."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from helpers.scripted_server import MODEL, OTHER_NAME, ScriptedServer
from minisgl.errors import EngineError
from minisgl.message import (
    ChatPrompt,
    PingMsg,
    TextPrompt,
    TokenPrompt,
    TokenText,
    ids_from_bytes,
)
from minisgl.message.frontend import FrontendMsg, PongMsg, UserReply
from minisgl.server.api.logprobs import TextLogprobs
from minisgl.server.frontend import Frontend
from minisgl.server.telemetry.observe import Observer
from minisgl.utils.zmq import AsyncPullQueue, Endpoints, PullQueue, PushQueue


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def events(response: httpx.Response) -> list[Any]:
    """Return the data of a complete stream of server-sent events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_chat_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat("one two three four"))
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "one two three four ."
    assert choice.finish_reason == "stop"
    assert answer.usage
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == 8
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat("one two three", max_completion_tokens=2))
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "length"


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            **chat("one 二 \U0001f600\n"), stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *content, last, usage = chunks
    assert content[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in content[1:]]
    assert texts == ["one ", "二 ", "\U0001f600 ", "."]
    assert [chunk.choices[0].finish_reason for chunk in content] == [None] * len(content)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in (*content, last))
    assert usage.choices == []
    assert usage.usage
    assert usage.usage.total_tokens == 6


def test_chat_stream_frames(http: httpx.Client) -> None:
    data = events(http.post("/v1/chat/completions", json=chat("one", stream=True)))
    assert data[-1] == "[DONE]"
    assert all("usage" not in chunk for chunk in data[:-1])
    data = events(
        http.post(
            "/v1/chat/completions",
            json=chat("one", stream=True, stream_options={"include_usage": True}),
        )
    )
    assert [chunk["usage"] is None for chunk in data[:-1]] == [True] * (len(data) - 2) + [False]


def test_completions_of_every_prompt_form(client: openai.OpenAI, server: ScriptedServer) -> None:
    for prompt, texts in (
        ("a b", ["a b ."]),
        (["a b", "c"], ["a b .", "c ."]),
        ([7, 8], ["7 8 ."]),
        ([[7, 8], [2**31 - 1]], ["7 8 .", "2147483647 ."]),
    ):
        answer = client.completions.create(model=MODEL, prompt=prompt)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))
        assert answer.usage
        assert answer.usage.completion_tokens == sum(text.count(" ") for text in texts)
    assert isinstance(server.received[-1].prompt, TokenPrompt)
    assert list(ids_from_bytes(server.received[-1].prompt.ids)) == [2**31 - 1]
    assert server.received[-1].sampling.seed != server.received[-2].sampling.seed


def test_completions_stream_of_several(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=["a b c", "d"],
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, usage = list(stream)
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["a b c .", "d ."]
    assert reasons == ["stop", "stop"]
    assert usage.usage
    assert usage.usage.prompt_tokens == 4


def test_every_sampling_field_arrives(client: openai.OpenAI, server: ScriptedServer) -> None:
    client.chat.completions.create(
        **chat("a"),
        temperature=0.5,
        top_p=0.75,
        seed=2**64 - 1,
        stop=["x", "y"],
        max_tokens=7,
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "ignore_eos": True,
            "stop_token_ids": [3, 4],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "truncate_prompt_tokens": 9,
            "priority": -3,
            "cache_salt": "tenant 1",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    message = server.received[-1]
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 5)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.125, 2**64 - 1, 7)
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "y"), (3, 4))
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert sampling.include_stop_str_in_output
    assert sampling.truncate_prompt_tokens == 9
    assert message.priority == -3
    assert message.namespace == "tenant 1"
    assert isinstance(message.prompt, ChatPrompt)
    assert message.prompt.template_args == {"enable_thinking": False}


def test_missing_fields_take_the_checkpoints_defaults(
    client: openai.OpenAI, server: ScriptedServer
) -> None:
    client.completions.create(model=MODEL, prompt="a", stop="x")
    sampling = server.received[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 1.0, None)
    assert sampling.stop == ("x",)
    assert sampling.seed is not None
    assert 0 <= sampling.seed < 2**63


def test_messages_reach_the_tokenizer(client: openai.OpenAI, server: ScriptedServer) -> None:
    part = {"type": "text", "text": "two"}
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"x": 1}'},
    }
    client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, part], "name": "Eve"},
            {"role": "assistant", "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
    )
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, part], "name": "Eve"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]


def test_fields_that_clients_add_to_a_call_do_not_reach_the_template(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    """OpenAI's stream and parse helpers add fields to a message, which a program sends back."""
    function = {"name": "now", "arguments": "{}"}
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {}, "strict": True}}
    asked: Any = chat("!part:call:now !part:arguments:{}", tools=[tool])
    parsed = client.chat.completions.parse(**asked)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for answer in (parsed, streamed):
        message: Any = answer.choices[0].message.model_dump()
        [call] = message["tool_calls"]
        assert call["function"]["parsed_arguments"] == {}
        result: Any = {"role": "tool", "content": "noon", "tool_call_id": call["id"]}
        client.chat.completions.create(
            **{**asked, "messages": [*asked["messages"], message, result]}
        )
        prompt = server.received[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        told = {"id": call["id"], "type": "function", "function": function}
        assert prompt.messages[1]["tool_calls"] == [told]
    assert "index" in call


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**chat("one"))
    messages = [
        {"role": "user", "content": "one"},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "two"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages)
    assert second.choices[0].message.content == "two ."


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, OTHER_NAME]
    assert client.models.retrieve(MODEL).owned_by == "minisgl"
    with pytest.raises(openai.NotFoundError, match="scripted"):
        client.models.retrieve("org/other")


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="serves 'scripted'") as error:
        client.completions.create(model="gpt-4", prompt="a")
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_scheduler_is_a_4xx(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="too long") as error:
        client.chat.completions.create(**chat("!refuse"), stream=stream)
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "messages"  # the scheduler says "prompt"; the client said this


def test_one_refused_prompt_refuses_the_call(client: openai.OpenAI, server: ScriptedServer) -> None:
    before = len(server.aborted)
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt=["!hang", "!refuse", "!hang"])
    assert raised.value.param == "prompt[1]"
    assert "prompt[1]: too long" in str(raised.value)
    assert len(server.wait_aborted(before + 2)) == before + 2


def test_failure_in_mid_stream(
    client: openai.OpenAI, http: httpx.Client, server: ScriptedServer
) -> None:
    server.resumed.clear()
    stream = client.chat.completions.create(**chat("one !pause !fail"), stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "one "]
    body = chat("one !pause !fail", stream=True)
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        server.resumed.set()  # both answers have begun
        response.read()
    with pytest.raises(openai.APIError, match="out of luck"):
        next(stream)
    data = events(response)
    assert data[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in data


@pytest.mark.parametrize("text", ["one !fail", "one !abort"])
def test_failure_of_a_whole_answer_is_a_5xx(client: openai.OpenAI, text: str) -> None:
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**chat(text))


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
    assert none.top_logprobs == [{}, {}, {}]


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
        ids = [chunk["choices"][0].get("token_ids", []) for chunk in streamed]
        assert [token for part in ids for token in part] == [3, 5, 0]
        assert "token_ids" not in http.post(path, json=body).json()["choices"][0]


def test_a_final_message_is_continued(client: openai.OpenAI, server: ScriptedServer) -> None:
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(**chat("one"), extra_body=options)
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == options
    options["add_generation_prompt"] = True
    with pytest.raises(openai.BadRequestError, match="set one of them"):
        client.chat.completions.create(**chat("one"), extra_body=options)


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


def test_head_is_get_without_a_body(http: httpx.Client) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/nothing"):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    refused = http.head("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def raw_connection(server: ScriptedServer) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 0), timeout=60)


def exchange(client: socket.socket, parts: list[bytes]) -> None:
    """Send a request in so many pieces, and return the completion."""
    for part in parts:
        client.sendall(part)
        time.sleep(0.05)
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(65536) or b"(closed)}"
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
    assert b'"finish_reason"' in answer


def test_removing_an_upgrade_header_keeps_the_other_headers(server: ScriptedServer) -> None:
    body = b'{"prompt": "a", "max_tokens": 2}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Upgrade: h2c\r\nContent-Length: %d\r\nUpgrade: web" % len(body)
    )
    with raw_connection(server) as client:
        exchange(client, [head, b"socket\r\n\r\n" + body])


@pytest.mark.parametrize("wish", [b"h2c", b"websocket"])
def test_an_upgrade_header_does_not_lose_the_body(server: ScriptedServer, wish: bytes) -> None:
    """Requests of Java's HttpClient, in one piece and in two; and a body that looks like one."""
    body = b'{"prompt": "a\\r\\nUpgrade: h2c", "max_tokens": 2}'
    fields = (
        b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: %b\r\n"
        b"Content-Type: application/json" % (len(body), wish)
    )
    head = b"POST /v1/completions HTTP/1.1\r\n" + fields + b"\r\n\r\n"
    with raw_connection(server) as client:
        for parts in ([head + body], [head, body]):
            exchange(client, parts)


def test_request_ids(http: httpx.Client) -> None:
    for good in ("abc-1", "x" * 128):
        given = http.get("/health", headers={"X-Request-Id": good})
        assert given.headers["x-request-id"] == good
    made = {
        http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        for bad in ("", "a b", "x" * 129)
    }
    assert len(made) == 3
    assert all(len(request_id) == 32 for request_id in made)
    assert len(http.get("/nothing").headers["x-request-id"]) == 32


def test_a_bug_of_the_server_is_a_500(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_(*args: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("minisgl.server.frontend.Frontend.submit", break_)
    response = http.post("/v1/chat/completions", json=chat("one"), headers={"x-request-id": "r"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "r"
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


def test_the_documented_schema_is_closed(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    references = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            references.update([node["$ref"]] if "$ref" in node else [])
            list(map(walk, node.values()))
        elif isinstance(node, list):
            list(map(walk, node))

    walk(schema)
    known = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    assert references <= known
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatRequest"
    }
    assert http.get("/docs").status_code == 200


# --- clients that leave, workers that die --------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("word", ["!forever", "!hang"])
def test_a_stream_that_is_closed_aborts_its_request(
    server: ScriptedServer, path: str, word: str
) -> None:
    before = len(server.aborted)
    body = {
        "/v1/chat/completions": chat(f"one {word}", stream=True),
        "/v1/completions": {"prompt": f"one {word}", "stream": True},
        "/generate": {"text": f"one {word}", "stream": True},
    }[path]
    with (
        httpx.Client(base_url=server.url) as http,
        http.stream("POST", path, json=body) as response,
    ):
        next(response.iter_bytes())
    assert len(server.wait_aborted(before + 1)) == before + 1
    assert server.num_open == 0


@pytest.mark.parametrize("text", ["!hang", "!wait"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_gives_up_waiting_aborts_its_request(
    server: ScriptedServer, text: str, stream: bool
) -> None:
    before = len(server.aborted)
    patience = httpx.Timeout(60, read=0.3)
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(base_url=server.url, timeout=patience) as http,
    ):
        list(http.post("/v1/chat/completions", json=chat(text, stream=stream)).iter_bytes())
    assert len(server.wait_aborted(before + 1)) == before + 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_client_that_leaves_within_its_body_is_not_an_error(path: str, caplog: Any) -> None:
    observer = Observer()
    with ScriptedServer(observer=observer) as server:
        address = urlsplit(server.url)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(f'{head}Content-Length: 100\r\n\r\n{{"pro'.encode())
            time.sleep(0.1)  # it is being read
        time.sleep(0.1)
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert not observer.errors
    assert not caplog.records


def test_a_finished_request_is_not_aborted(client: openai.OpenAI, server: ScriptedServer) -> None:
    before = len(server.aborted)
    client.chat.completions.create(**chat("one"))
    list(client.chat.completions.create(**chat("one"), stream=True))
    assert len(server.wait_aborted(before + 1, timeout_s=0.1)) == before


def test_a_dead_worker_ends_every_open_call() -> None:
    with ScriptedServer() as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ready"}
        with http.stream(
            "POST", "/v1/chat/completions", json=chat("one !hang", stream=True)
        ) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            error = EngineError("the engine process was killed by signal 9")
            error.status = 503
            server.fail(error)
            rest = [line for line in lines if line]
            assert (
                "killed by signal 9"
                in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
            )
        for response in (
            http.get("/health"),
            http.get("/ready"),
            http.post("/v1/chat/completions", json=chat("one")),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "server_error"
            assert "killed by signal 9" in response.json()["error"]["message"]


def test_ready_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.server.api_server.READY_TIMEOUT_S", 0.2)
    with ScriptedServer() as server, httpx.Client(base_url=server.url) as http:
        server.silent.set()
        response = http.get("/ready")
        assert response.status_code == 503
        assert "no answer" in response.json()["error"]["message"]
        assert http.get("/health").status_code == 200


def test_ready_during_a_long_step_and_the_age_of_the_last_token() -> None:
    """A ping does not come back during a step, but the workers make progress."""
    stalled: list[str | None] = [None]
    server = ScriptedServer(stalled=lambda: stalled[0])
    with server, httpx.Client(base_url=server.url, timeout=60) as http:
        server.silent.set()
        assert http.get("/ready").json() == {"status": "ready"}
        with (
            concurrent.futures.ThreadPoolExecutor() as pool,
            contextlib.suppress(httpx.HTTPError),
        ):
            asked = pool.submit(http.post, "/v1/chat/completions", json=chat("one"))
            while "oldest_token_age_s" not in (answer := http.get("/ready").json()):
                pass
            again = http.get("/ready").json()
            assert again["oldest_token_age_s"] >= answer["oldest_token_age_s"] + 0.5
            page = http.get("/metrics").text
            [age] = re.findall(r"^minisgl_oldest_token_age_seconds (\S+)$", page, re.MULTILINE)
            assert float(age) > again["oldest_token_age_s"]
            stalled[0] = "the engine process makes no progress"
            refused = http.get("/ready")
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == stalled[0]
            error = EngineError("the end")
            server.fail(error)
            assert asked.result().status_code == 500


@pytest.mark.parametrize("num_awake", [1, 2])
def test_ready_asks_every_tokenizer(num_awake: int) -> None:
    endpoints = Endpoints.create()
    inboxes: list[PullQueue[FrontendMsg]] = [
        PullQueue(endpoints.tokenizer(index), FrontendMsg) for index in range(2)
    ]
    replies: AsyncPullQueue[UserReply] = AsyncPullQueue(endpoints.api, UserReply)
    to_tokenizers = [PushQueue(endpoints.tokenizer(index)) for index in range(2)]
    to_api = PushQueue(endpoints.api)

    async def ping() -> bool:
        frontend = Frontend(to_tokenizers, replies)
        dispatch = asyncio.create_task(frontend.run())
        asked = asyncio.create_task(frontend.round_trips.ping(60 if num_awake == 2 else 0.3))
        for inbox in inboxes[:num_awake]:
            for message in await asyncio.to_thread(inbox.get, 60):
                assert isinstance(message, PingMsg)
                to_api.put([PongMsg(seq=message.seq)])
        is_ready = await asked
        dispatch.cancel()
        return is_ready

    try:
        assert asyncio.run(ping()) == (num_awake == 2)
    finally:
        for queue in (*inboxes, *to_tokenizers, to_api, replies):
            queue.close()
        endpoints.remove()
