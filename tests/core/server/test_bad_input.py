"""Wrong requests never reach a worker: they get OpenAI's error object with a sentence."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.api_requests import (
    CHAT,
    GENERATE,
    HELLO,
    RESPONSES,
    TEXT,
    hello,
    refused,
)
from helpers.key_files import FILE, OTHER, SECRET, key_file, key_ring
from helpers.scripted_server import ScriptedServer

FUNCTION = {"type": "function", "name": "f"}


def allowed(tools: list[Any], mode: str = "auto", **more: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "tools": tools, "mode": mode, **more}


def namespace(**member: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "n", "tools": [{"type": "function"} | member]}


@pytest.mark.needs("minisgl_gateway")
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
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "data": ""}]}]},
            "messages[0].content[0].type",
            "input_audio",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
            "missing",
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
        (
            CHAT,
            {"messages": [{"role": "user", "contents": "a"}]},
            "messages[0].contents",
            "did you mean content?",
        ),
        (CHAT, hello(tools=[{"name": "a"}]), "tools[0].name", "known are type, function, cache"),
        (CHAT, hello(tools=[{"type": "a"}]), "tools[0].type", "it may be function"),
        (
            CHAT,
            hello(tool_choice={"type": "function", "other": 1, "function": {"name": "f"}}),
            "tool_choice.other",
            "are type, function, allowed_tools",
        ),
        (CHAT, hello(tool_choice="must"), "tool_choice", "any, auto, none, required or an object"),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "assistant", "content": "a", "prefix": True}]},
            "messages[1].prefix",
            "use continue_final_message",
        ),
        (
            CHAT,
            hello(response_format={"type": "yaml"}),
            "response_format.type",
            "it may be json_object, json_schema or text",
        ),
        (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        (
            RESPONSES,
            {"input": "a", "tool_choice": {"type": "function"}},
            "tool_choice.name",
            "missing",
        ),
        *(
            (RESPONSES, {"input": "a", "tool_choice": choice}, f"tool_choice{path}", says)
            for choice, path, says in (
                ({"type": "mcp"}, ".type", "Invalid value 'mcp'"),
                ({"type": "function", "name": 1}, ".name", "a string"),
                (allowed([]), ".tools", "length >= 1"),
                (allowed([{"type": "function"}]), ".tools[0].name", "missing"),
                (allowed([{"type": "custom", "name": 1}]), ".tools[0].name", "a string"),
                (allowed([FUNCTION, "f"]), ".tools[1]", "an object"),
                (allowed([FUNCTION, {"type": "web_search"}]), ".tools[1].type", "function"),
                (allowed([FUNCTION], mode="all"), ".mode", "it may be auto or required"),
                (allowed([FUNCTION], mood="good"), ".mood", "not known"),
            )
        ),
        *(
            (RESPONSES, {"input": "a", "tools": [namespace(**member)]}, f"tools[0]{path}", says)
            for member, path, says in (
                ({}, ".tools[0].name", "missing"),
                ({"name": 1}, ".tools[0].name", "a string"),
                ({"name": "f", "description": 5}, ".tools[0].description", "a string or null"),
            )
        ),
        (CHAT, hello(max_new_tokens=1), "max_new_tokens", "did you mean max_tokens?"),
        (CHAT, hello(logit_bias={"1" * 5000: 1}), "logit_bias", "token ids"),
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
        (TEXT, hello(), "messages", "not known here; /v1/chat/completions and"),
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
        (f"/{'p' * 60_000}", {}),
        (TEXT, {"prompt": [["x" * 2_000_000]]}),
        (TEXT, {"prompt": ["a"] * 1024, "stop_token_ids": [1] * 50_001}),
    ],
    ids=["unknown", "long name", "role", "model", "seed", "path", "token", "stop ids"],
)
def test_large_input_is_refused_fast_and_not_repeated(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    start = time.monotonic()
    response = http.post(path, json=body)
    assert time.monotonic() - start < 30  # seconds a quadratic search took from 64 KB on
    refused(response, 404 if "model" in body or not body else 400)
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


def test_a_call_that_the_queue_can_never_hold() -> None:
    with ScriptedServer(max_queued=2) as server, httpx.Client(base_url=server.url) as http:
        error = refused(http.post(TEXT, json={"prompt": ["a", "b", "c"]}))
        assert error["param"] == "prompt"
        assert "3 prompts, but --max-queued-requests lets 2 wait" in error["message"]
        assert not server.received
        assert http.post(TEXT, json={"prompt": ["a", "b"]}).status_code == 200


def test_more_open_prompts_than_may_wait_on_their_way() -> None:
    """As many may be on the way to the queue as in it."""
    body = {"prompt": "one !hang", "stream": True}
    with (
        ScriptedServer(max_queued=1) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", TEXT, json=body) as first,
        http.stream("POST", TEXT, json=body) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        error = refused(http.post(TEXT, json={"prompt": "a"}), 429)
        assert error["message"] == "2 prompts are open already; try again later"


@pytest.mark.needs("minisgl_gateway")
def test_open_prompts_of_one_key_leave_room_for_another(tmp_path: Path) -> None:
    body = {"prompt": "one !hang", "stream": True}
    first, second = {"x-api-key": SECRET}, {"x-api-key": OTHER}
    with (
        ScriptedServer(max_queued=1, keys=key_ring(key_file(tmp_path, FILE))) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", TEXT, json=body, headers=first),
        http.stream("POST", TEXT, json=body, headers=first),
    ):
        assert http.post(TEXT, json={"prompt": "a"}, headers=first).status_code == 429
        assert http.post(TEXT, json={"prompt": "a"}, headers=second).status_code == 200


def test_many_choices_of_a_large_prompt(http: httpx.Client, server: ScriptedServer) -> None:
    before = len(server.received)
    error = refused(http.post(TEXT, json={"prompt": "a" * 2**20, "n": 65}))
    assert error["param"] == "n"
    assert "65 answers need 65 MiB for copies of the prompt and its options" in error["message"]
    assert len(server.received) == before


@pytest.mark.needs("minisgl_zoo")
def test_many_prompts_with_a_large_option(http: httpx.Client, server: ScriptedServer) -> None:
    before = len(server.received)
    ids = [10**6] * 20_000
    error = refused(http.post(TEXT, json={"prompt": ["a"] * 1024, "allowed_token_ids": ids}))
    assert error["param"] == "prompt"
    assert error["message"].startswith("1024 answers need 98 MiB for copies of the prompt and")
    error = refused(http.post(TEXT, json={"prompt": "a", "allowed_token_ids": [1] * (2**18 + 1)}))
    assert error["message"] == "allowed_token_ids may have at most 262144 tokens, got 262145"
    assert len(server.received) == before


def test_no_hint_for_a_name_with_the_opposite_meaning(http: httpx.Client) -> None:
    """max_tokens means the opposite of min_tokens."""
    error = refused(http.post(GENERATE, json={"text": "a", "min_tokens": 1}))
    assert error["message"] == "the field min_tokens is not known here"
    error = refused(http.post(CHAT, json=hello(min_completion_tokens=1)))
    assert error["message"] == "the field min_completion_tokens is not known here"
