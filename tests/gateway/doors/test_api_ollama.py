"""Ollama's API as its Python client sees it, over a scripted pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from ollama._types import ChatRequest, GenerateRequest, Options

from helpers.scripted_server import MODEL, OTHER_NAME, ScriptedServer
from minisgl import __version__
from minisgl.message import ChatPrompt, TextPrompt, TokenText
from minisgl.server.api.answers import ChatLogprobs
from minisgl_gateway.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from minisgl_gateway.ollama.routes import _OllamaForm


@pytest.fixture(scope="module")
def llama(server: ScriptedServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def received(server: ScriptedServer) -> ChatPrompt:
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_whole_chat(llama: ollama.Client) -> None:
    answer = llama.chat(MODEL, user("one two"))
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "stop")
    assert (answer.message.role, answer.message.content) == ("assistant", "one two .")
    assert (answer.prompt_eval_count, answer.eval_count) == (2, 2)
    assert (answer.prompt_eval_duration, answer.eval_duration) == (5 * 10**8, 10**9)
    assert answer.total_duration == 175 * 10**7
    cut = llama.chat(MODEL, user("one two"), options={"num_predict": 1})
    assert (cut.message.content, cut.done_reason) == ("one ", "length")


def test_streams_add_up(llama: ollama.Client) -> None:
    for text in ("one 二 \U0001f600", ""):
        if text:
            parts = list(llama.chat(MODEL, user(text), stream=True))
            assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
            whole = llama.chat(MODEL, user(text))
            streamed = "".join(part.message.content or "" for part in parts)
            assert streamed == whole.message.content == f"{text} ."
            assert parts[-1].eval_count == whole.eval_count
    pieces = list(llama.generate(MODEL, "one two", stream=True))
    assert "".join(piece.response or "" for piece in pieces) == "one two ."


def test_a_stream_is_the_default_and_is_lines_of_json(http: httpx.Client) -> None:
    body = json.dumps({"model": MODEL, "messages": user("one")})
    response = http.post("/api/chat", content=body)  # without a content type
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False, False, True]
    assert set(lines[0]) == {"model", "created_at", "message", "done"}


def test_bytes_are_read_as_json(http: httpx.Client) -> None:
    """As LiteLLM sends them from asyncio. A form, which any web page can send, is refused."""
    body = json.dumps({"model": MODEL, "messages": user("one"), "stream": False})
    kinds = ("application/octet-stream", "application/x-www-form-urlencoded", "text/plain")
    answers = [http.post("/api/chat", content=body, headers={"content-type": t}) for t in kinds]
    assert [answer.status_code for answer in answers] == [200, 415, 415]


def test_messages(llama: ollama.Client, server: ScriptedServer) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    llama.chat(
        MODEL,
        [
            {"role": "system", "content": "be brief"},
            *user("weather?"),
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_name": "f"},
            *user("so?"),
        ],
        think=False,
    )
    function = {"name": "f", "arguments": '{"a":1}'}
    assert received(server).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_2_0", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "name": "f"},
        {"role": "user", "content": "so?"},
    ]
    assert received(server).template_args == {"enable_thinking": False}


SPLIT = (
    "!part:reasoning:hm !part:content:I !part:content:call !part:call:f "
    '!part:arguments:{"a": !part:arguments:1} !part:call:g !part:arguments:{}'
)


def test_thinking_and_tools(llama: ollama.Client, server: ScriptedServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    whole = llama.chat(MODEL, user(SPLIT), tools=[tool], think="high")
    assert received(server).tools == [tool]
    assert received(server).template_args == {"reasoning_effort": "high"}
    parts = list(llama.chat(MODEL, user(SPLIT), tools=[tool], stream=True))
    for messages in ([whole.message], [part.message for part in parts]):
        assert "".join(message.thinking or "" for message in messages) == "hm"
        assert "".join(message.content or "" for message in messages) == "Icall"
        calls = [call.function for message in messages for call in message.tool_calls or ()]
        assert [(call.name, call.arguments) for call in calls] == [("f", {"a": 1}), ("g", {})]
    told = llama.generate(MODEL, "!part:reasoning:hm !part:content:so")
    assert (told.thinking, told.response) == ("hm", "so")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_no_null(server: ScriptedServer, stream: bool) -> None:
    """Rig, of Rust, reads a `type` that may be left out, and refuses null."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = {"model": MODEL, "messages": user(SPLIT), "tools": [tool], "stream": stream}
    lines = httpx.post(f"{server.url}/api/chat", json=asked).text.splitlines()
    found = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
    for call in found:
        call.pop("id")
    assert found == [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]


def test_a_choice_of_tools(server: ScriptedServer) -> None:
    """Ollama has none; its provider for the AI SDK sends one with all tools."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    named = {"type": "function", "function": {"name": "f"}}
    asked: dict[str, Any] = {"model": MODEL, "messages": user("one"), "tools": [tool]}
    for given, choice in (("auto", "auto"), ("required", "required"), (named, "f")):
        httpx.post(f"{server.url}/api/chat", json=asked | {"tool_choice": given})
        assert received(server).tool_choice == choice
    httpx.post(f"{server.url}/api/chat", json=asked | {"tool_choice": "none"})
    assert received(server).tools == []


def test_generate(llama: ollama.Client, server: ScriptedServer) -> None:
    assert llama.generate(MODEL, "one two", system="be brief").response == "one two ."
    assert [m["role"] for m in received(server).messages] == ["system", "user"]
    llama.generate(MODEL, "one two", raw=True)
    assert server.received[-1].prompt == TextPrompt(text="one two")
    for more in ({"system": "be brief"}, {"images": ["aaaa"]}):
        (name,) = more
        with pytest.raises(ollama.ResponseError, match=f"^{name} is for chat templates") as refused:
            llama.generate(MODEL, "one", raw=True, **more)
        assert refused.value.status_code == 400
    num_received = len(server.received)
    assert llama.generate(MODEL, "").done_reason == "load"
    assert llama.chat(MODEL, []).done_reason == "load"
    assert len(server.received) == num_received


def test_options(llama: ollama.Client, server: ScriptedServer) -> None:
    options: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125}
    options |= {"seed": 3, "stop": ["x"], "num_predict": 7, "num_ctx": 4096, "num_gpu": 1}
    penalties = {"repeat_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    llama.chat(MODEL, user("one"), options=options | penalties, keep_alive="5m")
    message = server.received[-1]
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 9)
    assert (sampling.min_p, sampling.seed, sampling.stop) == (0.125, 3, ("x",))
    assert (sampling.max_tokens, message.is_clamped) == (7, True)
    assert sampling.repetition_penalty == 1.25
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    llama.chat(MODEL, user("one"), options={"num_predict": -1})
    assert server.received[-1].sampling.max_tokens is None


def test_formats(llama: ollama.Client, server: ScriptedServer) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given, expected in (
        ("json", {"json_object": True}),
        (schema, {"json": json.dumps(schema, separators=(",", ":"))}),
    ):
        llama.chat(MODEL, user("one"), format=given)
        assert server.received[-1].sampling.structured_outputs == expected
    llama.chat(MODEL, user("one"), format="")
    assert server.received[-1].sampling.structured_outputs is None


def test_log_probabilities(llama: ollama.Client) -> None:
    for stream in (False, True):
        answer: Any = llama.chat(MODEL, user("one"), logprobs=True, top_logprobs=1, stream=stream)
        parts = list(answer) if stream else [answer]
        entries = [entry for part in parts for entry in part.logprobs or ()]
        assert [entry.token for entry in entries] == ["one", "."]
        assert entries[0].logprob == -1.5
        assert entries[0].top_logprobs[0].token == "one"


def test_lists(llama: ollama.Client, http: httpx.Client) -> None:
    assert [entry.model for entry in llama.list().models] == [MODEL, OTHER_NAME]
    entry = llama.list().models[0]
    assert entry.details
    assert (entry.details.family, entry.details.quantization_level) == ("qwen3", "BFLOAT16")
    assert entry.size
    assert entry.size > 9_000_000
    assert entry.modified_at
    running = llama.ps().models[0]
    assert running.model == MODEL
    assert running.expires_at
    assert running.expires_at.year == 9999
    shown = llama.show(f"{MODEL}:latest")
    assert shown.capabilities == ["completion"]
    assert "<|im_start|>" in (shown.template or "")
    assert shown.modelinfo
    assert shown.modelinfo["general.architecture"] == "qwen3"
    assert http.get("/api/version").json() == {"version": __version__}


def test_a_name_with_ollamas_tag() -> None:
    body = {"model": "a:latest", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    with ScriptedServer(names=("a:latest",)) as server:
        assert httpx.post(f"{server.url}/api/chat", json=body).json()["model"] == "a:latest"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"options": {"mirostat": 1}}, r"options\.mirostat"),
        ({"options": {"no_such": 1}}, r"options\.no_such is not known"),
        ({"options": {"temperature": 3.0}}, "temperature"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "role"),
        ({"nonsense": 1}, "nonsense is not known"),
        ({"options": {"num_predict": 2**31}}, "options.num_predict must be from 1"),
        ({"options": {"repeat_penalty": 20}}, "options.repeat_penalty must be between"),
        ({"options": {"temperature": 3}}, "options.temperature must be between"),
        ({"format": {"type": "object", "not": json.loads("[" * 101 + "]" * 101)}}, "^format has"),
    ],
)
def test_refusals_in_ollamas_form(http: httpx.Client, fields: dict[str, Any], match: str) -> None:
    body = {"model": MODEL, "messages": user("a")} | fields
    response = http.post("/api/chat", json=body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    with pytest.raises(AssertionError, match=match):
        raise AssertionError(response.json()["error"])


def test_failures(llama: ollama.Client, http: httpx.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not served here") as raised:
        llama.chat("other", user("a"))
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="out of luck"):
        llama.chat(MODEL, user("!fail"))
    with pytest.raises(ollama.ResponseError, match="out of luck"):
        list(llama.chat(MODEL, user("one !fail"), stream=True))
    for call in (llama.pull, llama.push, llama.delete):
        with pytest.raises(
            ollama.ResponseError, match="`minisgl pull` downloads another"
        ) as raised:
            call("other")
        assert raised.value.status_code == 404
    assert "nothing at /api/blobs" in http.post("/api/blobs", json={}).json()["error"]


def test_no_field_of_ollamas_schema_is_unknown() -> None:
    pairs: Any = (
        (ChatRequest, OllamaChatRequest),
        (GenerateRequest, OllamaGenerateRequest),
        (Options, OllamaOptions),
    )
    for theirs, ours in pairs:
        assert set(theirs.model_fields) <= set(ours.__struct_fields__)


def test_log_probabilities_of_a_token_without_text_are_sent() -> None:
    form = _OllamaForm(MODEL, is_chat=True, has_logprobs=True)
    logprobs = ChatLogprobs.of([TokenText(data=b"\xe4", offset=0)], [-1.5]).content
    line = json.loads(form.text([], logprobs))
    assert [entry["logprob"] for entry in line["logprobs"]] == [-1.5]
