"""Wrong requests never reach a worker: they get OpenAI's error object with a sentence."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.shared.error_object import ErrorObject

from helpers.scripted_server import ScriptedServer
from minisgl.message import ChatPrompt
from minisgl.server import body as bodies

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "hello"}]


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    ErrorObject.model_validate(body["error"])
    error: dict[str, Any] = body["error"]
    assert len(error["message"]) > 15
    return error


def hello(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {}, "messages", "missing"),
        (CHAT, {"messages": []}, "messages", "length >= 1"),
        (CHAT, {"messages": "hello"}, "messages", "array"),
        (CHAT, {"messages": ["hello"]}, "messages[0]", "object"),
        (CHAT, {"messages": [{}]}, "messages[0].role", "missing"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "text"),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "king", "content": ""}]},
            "messages[1].role",
            "developer",
        ),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "str"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", "mood": "good"}]},
            "messages[0].mood",
            "not known",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", "audio": {}}]},
            "messages[0].audio",
            "text",
        ),
        (CHAT, hello(temprature=1), "temprature", "did you mean temperature?"),
        (CHAT, hello(guided_yaml={}), "guided_yaml", "not known"),
        (CHAT, hello(max_new_tokens=1), "max_new_tokens", "did you mean max_tokens?"),
        (CHAT, hello(temperature=-1), "temperature", "between 0 and 2"),
        (CHAT, hello(temperature=2.5), "temperature", "between 0 and 2"),
        (CHAT, hello(temperature="hot"), "temperature", "expected a number or null, got a string"),
        (CHAT, hello(top_p=0), "top_p", "above 0"),
        (CHAT, hello(top_p=1.5), "top_p", "at most 1"),
        (CHAT, hello(min_p=-0.1), "min_p", "between 0 and 1"),
        (CHAT, hello(top_k=-2), "top_k", ">= -1; 0 and -1 are for all"),
        (CHAT, hello(max_tokens=0), "max_tokens", "expected an integer >= 1"),
        (CHAT, hello(max_tokens=-5), "max_tokens", ">= 1"),
        (CHAT, hello(max_tokens=10**30), "max_tokens", "int"),
        (CHAT, hello(max_tokens=True), "max_tokens", "an integer or null, got a boolean"),
        (CHAT, hello(max_tokens="5"), "max_tokens", "an integer or null, got a string"),
        (CHAT, hello(max_tokens=5.5), "max_tokens", "got a decimal number"),
        (CHAT, hello(max_completion_tokens=0), "max_completion_tokens", ">= 1"),
        (CHAT, hello(max_tokens=5, max_completion_tokens=6), "max_completion_tokens", "one of"),
        (CHAT, hello(seed=2**64), "seed", "64 bits"),
        (CHAT, hello(seed=10**400), "seed", "64 bits"),
        (CHAT, hello(priority=2**31), "priority", "<="),
        (CHAT, hello(cache_salt="x" * 257), "cache_salt", "length <= 256"),
        (CHAT, hello(cache_salt=5), "cache_salt", "expected a string or null, got an integer"),
        (CHAT, hello(stop=5), "stop", "expected a string, an array or null, got an integer"),
        (CHAT, hello(stop=""), "stop", "characters"),
        (CHAT, hello(stop=["x"] * 17), "stop", "at most 16"),
        (CHAT, hello(stop=["x" * 1025]), "stop", "1024"),
        (CHAT, hello(stop=[1]), "stop[0]", "a string"),
        (CHAT, hello(stop_token_ids=[-1]), "stop_token_ids[0]", ">= 0"),
        (CHAT, hello(stream="yes"), "stream", "expected a boolean or null, got a string"),
        (CHAT, hello(stream_options={}), "stream_options", "stream=true"),
        (CHAT, hello(stream=True, stream_options={"x": 1}), "stream_options.x", "not known"),
        (CHAT, hello(stream=True, stream_options=[]), "stream_options", "object"),
        (CHAT, hello(chat_template_kwargs=[1]), "chat_template_kwargs", "object"),
        (CHAT, hello(chat_template_kwargs={"x": 10**30}), None, "out of range"),
        (CHAT, hello(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "a field"),
        (TEXT, {}, "prompt", "missing"),
        (TEXT, {"prompt": None}, "prompt", "null"),
        (TEXT, {"prompt": []}, "prompt", "empty"),
        (TEXT, {"prompt": [[]]}, "prompt[0]", "no token ids"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "mixture"),
        (TEXT, {"prompt": [1, -1]}, "prompt", "[1]"),
        (TEXT, {"prompt": [2**31]}, "prompt", "2147483648"),
        (TEXT, {"prompt": [1.5]}, "prompt", "mixture"),
        (TEXT, {"prompt": [True]}, "prompt", "mixture"),
        (TEXT, {"prompt": [[1, "a"]]}, "prompt[0]", '"a"'),
        (TEXT, {"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        (GENERATE, {}, "text", "exactly one"),
        (GENERATE, {"text": "a", "input_ids": [1]}, "text", "exactly one"),
        (GENERATE, {"input_ids": []}, "input_ids", "no token ids"),
        (GENERATE, {"text": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "messages"),
        (GENERATE, {"text": "a", "best_of": 1}, "best_of", "not known"),
    ],
)
def test_wrong_fields(
    http: httpx.Client, server: ScriptedServer, path: str, body: Any, param: str | None, says: str
) -> None:
    before = len(server.received)
    for stream in ({}, {"stream": True}) if "stream" not in str(body) else ({},):
        error = refused(http.post(path, json=body | stream))
        assert error["param"] == param, error
        assert says in error["message"]
        assert error["type"] == "invalid_request_error"
    assert len(server.received) == before


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"} x', "trailing"),
        (b"[]", "JSON object"),
        (b'"a"', "JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": Infinity}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN and Infinity are not JSON"),
        (b'{"prompt": "a",}', "trailing comma in object (byte 15)"),
        (b'{"prompt": "\\ud800 and more text"}', "not valid JSON"),
        (b'{"\xff": 1, "prompt": "a"}', "not valid UTF-8"),
        (b'{"prompt": ["a", ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\\ud800 and more text"}', "half of a surrogate pair"),
        (b"\xef\xbb\xbf{}", "without a byte order mark"),
        ('{"prompt": "a"}'.encode("utf-16"), "without a byte order mark"),
        (b" \n ", "only spaces"),
        (b'{"prompt": "a\x00b"}', "not valid JSON"),
    ],
)
def test_wrong_bytes(http: httpx.Client, body: bytes, says: str) -> None:
    response = http.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert says in refused(response)["message"]


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (b'{"prompt": "a"', "truncated"),
        (b'{"prompt": tru}', "invalid character (byte 15)"),
        (b'{"temperature": -}', "(byte 17)"),
    ],
)
def test_wrong_bytes_without_a_hint(http: httpx.Client, body: bytes, end: str) -> None:
    response = http.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert refused(response)["message"].endswith(end)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {" - at `$" * 100_000 + "\n": 1}),
        (GENERATE, {"a" * 2_000_000: 1}),
        (CHAT, {"messages": [{"role": " - at `$" * 100_000, "content": ""}]}),
        (CHAT, hello(model="m" * 2_000_000)),
        (CHAT, hello(seed=10**4000)),
        (TEXT, {"prompt": [["x" * 2_000_000]]}),
        (TEXT, {"prompt": ["a"] * 1024, "stop_token_ids": [1] * 50_001}),
    ],
    ids=["unknown", "long name", "role", "model", "seed", "token", "stop ids"],
)
def test_large_input_is_refused_fast_and_not_repeated(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    start = time.monotonic()
    response = http.post(path, json=body)
    assert time.monotonic() - start < 30  # seconds a quadratic search took from 64 KB on
    refused(response, 404 if "model" in body else 400)
    assert len(response.content) < 2000


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "x - at `$.y", "content": "a"}, "messages[0].role"),
        ({"role": "user", "rolle - at `$.max_tokens": "x"}, "messages[0].rolle - at `$.max_tokens"),
    ],
)
def test_a_clients_text_is_not_taken_for_a_path(
    http: httpx.Client, message: dict[str, str], param: str
) -> None:
    assert refused(http.post(CHAT, json={"messages": [message]}))["param"] == param


def test_half_a_body_times_out(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_PAUSE_S", 1.0)

    def slowly(pause_s: float) -> Iterator[bytes]:
        for piece in (b'{"text": "a",', b'"max_tokens": 1,', b' "seed": 1,', b'"min_p": 3}'):
            yield piece
            time.sleep(pause_s)

    headers = {"content-type": "application/json"}
    assert refused(http.post(GENERATE, content=slowly(0.27), headers=headers))["param"] == "min_p"
    monkeypatch.setattr(bodies, "MAX_PAUSE_S", 0.3)
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as client:
        client.settimeout(60)
        client.sendall(b"POST /generate HTTP/1.1\r\nhost: a\r\nconnection: close\r\n")
        client.sendall(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n")
        client.sendall(b'{"te')
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in answer


@pytest.mark.parametrize("ends", [False, True])
def test_endless_headers_are_refused(http: httpx.Client, ends: bool) -> None:
    """Headers that end within the limit are accepted."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as client:
        client.settimeout(60)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx-a: ")
        client.sendall(b"a" * (60_000 if ends else 70_000))
        if ends:
            client.sendall(b"\r\nconnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK" if ends else b"HTTP/1.1 431 Request Header")
    if not ends:
        assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    ids=["TLS", "HTTP/2"],
)
def test_bytes_of_another_protocol(http: httpx.Client, sent: bytes) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as client:
        client.settimeout(60)
        client.sendall(sent)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    error = ErrorObject.model_validate(json.loads(body)["error"])
    assert error.code == "invalid_http"
    assert "an http:// URL" in error.message


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_template_variables_nested_too_deeply(
    http: httpx.Client, server: ScriptedServer, path: str
) -> None:
    def post(depth: int) -> httpx.Response:
        variables = '{"x": [1, ' * (depth // 2) + ("{}" if depth % 2 else "2")
        variables += "]}" * (depth // 2)
        body = f'{{"messages": {json.dumps(HELLO)}, "chat_template_kwargs": {variables}}}'
        return http.post(path, content=body, headers={"content-type": "application/json"})

    assert post(100).status_code == 200
    before = len(server.received)
    for depth in (101, 500, *range(940, 970), 100_000):  # Python's own limit is among them
        error = refused(post(depth))
        if error["param"]:
            assert error["param"] == "chat_template_kwargs"
            assert "has more than 100 levels of nested objects" in error["message"]
        else:
            assert error["message"] == "the body is nested too deeply"
    assert len(server.received) == before


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_wrong_content_type(http: httpx.Client, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    error = refused(http.post(CHAT, content=json.dumps(hello()), headers=headers), 415)
    got = f"got {kind!r}:" if kind else "got none:"
    assert f"{got} add the header 'Content-Type: application/json'" in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "GZip", "br", "gzip, identity"])
def test_wrong_content_encoding(http: httpx.Client, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = gzip.compress(json.dumps(hello()).encode())
    error = refused(http.post(CHAT, content=body, headers=headers), 415)
    assert f"no content encoding, got {encoding.lower()!r}" in error["message"]
    assert error["code"] == "unsupported_media_type"


def test_the_content_encoding_identity_is_accepted(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "identity"}
    assert http.post(CHAT, content=json.dumps(hello()), headers=headers).status_code == 200


def test_body_too_large(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"a" * 2**24 + b'"}'
    error = refused(
        http.post(TEXT, content=body, headers={"content-type": "application/json"}), 413
    )
    assert "16777216" in error["message"]
    assert http.get("/health").status_code == 200


def test_a_call_that_the_queue_can_never_hold() -> None:
    with ScriptedServer(max_queued=2) as server, httpx.Client(base_url=server.url) as http:
        error = refused(http.post(TEXT, json={"prompt": ["a", "b", "c"]}))
        assert error["param"] == "prompt"
        assert "3 prompts, but --max-queued-requests lets 2 wait" in error["message"]
        assert not server.received
        assert http.post(TEXT, json={"prompt": ["a", "b"]}).status_code == 200


def test_many_choices_of_a_large_prompt(http: httpx.Client, server: ScriptedServer) -> None:
    before = len(server.received)
    error = refused(http.post(TEXT, json={"prompt": "a" * 2**20, "n": 65}))
    assert error["param"] == "n"
    assert "65 MiB for copies of the prompt, and 64 MiB are allowed" in error["message"]
    assert len(server.received) == before


def test_no_hint_for_a_name_with_the_opposite_meaning(http: httpx.Client) -> None:
    """max_tokens means the opposite of min_tokens."""
    error = refused(http.post(GENERATE, json={"text": "a", "min_tokens": 1}))
    assert error["message"] == "the field min_tokens is not known here"
    error = refused(http.post(CHAT, json=hello(min_completion_tokens=1)))
    assert error["message"] == "the field min_completion_tokens is not known here"


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    for path in ("/v1/chat", "/pages", "/v1"):
        assert f"nothing at {path}; /docs" in refused(http.post(path), 404)["message"]
    for path in (f"{CHAT}/", f"/v1{CHAT}", "/chat/completions"):
        assert refused(http.post(path), 404)["message"].endswith(f"; did you mean {CHAT}?")
    wrong_method = http.get(CHAT)
    assert "POST" in refused(wrong_method, 405)["message"]
    assert wrong_method.headers["allow"] == "POST"


# --- every field of OpenAI's schema --------------------------------------------------------------

HONOURED = {
    "model",
    "messages",
    "prompt",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
}
CHANGES_NOTHING = {
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
}
# field: (values that change nothing, values that are refused)
NEUTRAL: dict[str, tuple[list[Any], list[Any]]] = {
    "audio": ([None], [{"voice": "alloy", "format": "mp3"}]),
    "best_of": ([None, 1], [2, 0]),
    "echo": ([None, False, True], [1]),
    "frequency_penalty": ([None, 0, 0.0, 0.5, -1], [2.5, -3]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "logit_bias": ([None, {}, {"50256": -100}], [{"5": 101}, {"a": 1}, {"-1": 1}]),
    "modalities": ([None, ["text"]], [["text", "audio"]]),
    "moderation": ([None], [{"model": "m"}]),
    "n": ([None, 1, 2], [0, -1, 129]),
    "presence_penalty": ([None, 0, 0.5], [-2.5]),
    "prompt_cache_options": ([None, {"mode": "implicit"}], [{"mode": "explicit"}]),
    "reasoning_effort": ([None, "low", "none"], [1]),
    "response_format": ([None, {"type": "text"}, {"type": "json_object"}], ["json"]),
    "store": ([None, False], [True]),
    "suffix": ([None, ""], ["the end"]),
    "tool_choice": (
        ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}],
        [1],
    ),
    "tools": ([[], [{"type": "function", "function": {"name": "f"}}]], [1]),
    "top_logprobs": ([None, 0], [3, 21, -1]),
    "verbosity": ([None, "medium"], ["low"]),
    "web_search_options": ([None], [{}]),
}
# Extensions that clients of other engines send, likewise.
EXTENSIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "repetition_penalty": ([None, 1, 1.0, 1.1], [0, -1, 11]),
    "length_penalty": ([None, 1.0], [0.5]),
    "use_beam_search": ([None, False], [True]),
    "min_tokens": ([None, 0, 3], [-1]),
    "bad_words": ([None, [], ["no"]], [[""], ["x" * 257], ["a"] * 257, "no"]),
    "allowed_token_ids": ([None, [1]], [[]]),
    "prompt_logprobs": ([None], [-1, 21]),
    "include_stop_str_in_output": ([None, False], [1]),
    "return_token_ids": ([None, False], [1]),
    "return_tokens_as_token_ids": ([None, False], [True]),
    "top_k": ([None, -1, 0], [-2]),
    "truncate_prompt_tokens": ([None, 5], [0]),
    "spaces_between_special_tokens": ([None, True], [False]),
}
CHAT_EXTENSIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "add_generation_prompt": ([None, True, False], [1]),
    "continue_final_message": ([None, False, True], [1]),
    "add_special_tokens": ([None, False], [True]),
    "separate_reasoning": ([None, True], [False]),
    "stream_reasoning": ([None, True], [False]),
    "include_reasoning": ([None, True], [False]),
    "thinking": ([None, {"type": "enabled"}], [True]),
    "echo": ([None, False], [True]),
}
TEXT_EXTENSIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "add_special_tokens": ([None, True, False], [1]),
}
LOGPROBS: dict[str, tuple[list[Any], list[Any]]] = {
    CHAT: ([None, False, True], [5]),
    TEXT: ([None, 0, 5], [21, -1]),
}


def fields_of(params: Any) -> list[str]:
    kinds = get_args(params.CompletionCreateParams)
    return sorted({name for kind in kinds for name in kind.__annotations__})


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, name) for name in fields_of(chat_params)]
    + [(TEXT, name) for name in fields_of(text_params)],
)
def test_no_openai_field_is_dropped_in_silence(http: httpx.Client, path: str, field: str) -> None:
    if field in HONOURED:
        return  # test_api_openai.py shows how
    base = hello() if path == CHAT else {"prompt": "hello"}
    neutral, others = NEUTRAL.get(field, ([], []))
    if field == "logprobs":
        neutral, others = LOGPROBS[path]
    if field in CHANGES_NOTHING:
        neutral = [CHANGES_NOTHING[field]]
    assert neutral, f"OpenAI's schema has a field that no test knows: {field}"
    for value in neutral:
        assert http.post(path, json=base | {field: value}).status_code == 200
    for value in others:
        error = refused(http.post(path, json=base | {field: value}))
        assert error["param"] == field
        assert field in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_extensions_are_neutral_or_refused(http: httpx.Client, path: str) -> None:
    base = hello() if path == CHAT else {"prompt": "hello"}
    extensions = EXTENSIONS | (CHAT_EXTENSIONS if path == CHAT else TEXT_EXTENSIONS)
    for field, (neutral, others) in extensions.items():
        for value in neutral:
            assert http.post(path, json=base | {field: value}).status_code == 200, field
        for value in others:
            assert refused(http.post(path, json=base | {field: value}))["param"] == field


def test_tools_that_must_not_be_called_stay_out_of_the_prompt(
    http: httpx.Client, server: ScriptedServer
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert http.post(CHAT, json=hello(tools=tools, tool_choice="none")).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == {}
    assert prompt.tools == []
    assert http.post(CHAT, json=hello(tools=tools)).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["f"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_an_assistant_reaches_the_template(
    http: httpx.Client, server: ScriptedServer, name: str
) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "4", name: "2 + 2"},
        {"role": "user", "content": "hello"},
    ]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "2 + 2",
    }


def test_neutral_values_are_compared_with_their_json_type(http: httpx.Client) -> None:
    assert refused(http.post(CHAT, json=hello(n=True)))["param"] == "n"
    assert refused(http.post(CHAT, json=hello(store=0)))["param"] == "store"
    assert refused(http.post(TEXT, json={"prompt": "a", "logprobs": False}))["param"] == "logprobs"
