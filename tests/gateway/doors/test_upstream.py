"""`minisgl gateway`: the doors before another server, this project's and a plain one."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from helpers.gateway_thread import (
    AppThread,
    PlainUpstream,
    gateway_before,
    streamed,
    streamed_from,
)
from helpers.scripted_server import MODEL, ScriptedServer
from helpers.waiting import ask_and_leave
from minisgl_gateway.router import upstream as router_upstream
from minisgl_gateway.upstream import reading
from minisgl_gateway.upstream.chat import OWNER, UpstreamChat, _Entry
from minisgl_gateway.upstream.serve import gateway as gateway_command
from minisgl_gateway.upstream.wire import Reader

MESSAGES, RESPONSES, CHAT, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
PARTS = "!part:reasoning:hm !part:content:one !part:call:f !part:arguments:{} !part:call:g"
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def gateway(server: ScriptedServer) -> Iterator[AppThread]:
    with gateway_before(server.url) as running:
        yield running


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CASES: list[tuple[str, dict[str, Any]]] = [
    (path, {**base, **fields})
    for path, of_text, several in (
        (
            MESSAGES,
            lambda text: {"max_tokens": 50, "messages": said(text)},
            (
                {"stop_sequences": ["END"], "top_k": 5, "temperature": 0.5},
                {"max_tokens": 2},
                {"tools": [TOOL], "tool_choice": {"type": "any"}, "system": "s"},
                {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
                {"model": "another"},
                {"max_tokens": 0},
                {"top_p": 7},
                {"timeout": 60},
            ),
        ),
        (
            RESPONSES,
            lambda text: {"input": text},
            (
                {"tools": [FUNCTION], "tool_choice": "required", "instructions": "i"},
                {"top_logprobs": 1},
                {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
                {"reasoning": {"effort": "low"}},
                {"max_output_tokens": 2},
                {"previous_response_id": "none"},
            ),
        ),
        (
            CHAT,
            lambda text: {"messages": said(text)},
            (
                {"options": {"num_predict": 2, "min_p": 0.1, "repeat_penalty": 1.1}},
                {"think": False, "format": "json"},
                {"logprobs": True, "top_logprobs": 2},
                {"model": f"{MODEL}:latest"},
                {"options": {"top_p": 9}},
            ),
        ),
        (GENERATE, lambda text: {"prompt": text}, ({"system": "s"}, {"raw": 1})),
    )
    for text in ("one two END three", PARTS, "!refuse", "one !fail")
    for base in [{"model": MODEL, **of_text(text)}]
    for fields in ({}, *several)
] + [(GENERATE, {"model": MODEL, "prompt": "one two", "raw": True})]
_MASKS = (
    (r'"(id|item_id|call_id)":"([a-z]+_)?[0-9a-f]{9,}"', r'"\1":"\2"'),
    (r'"(created_at|modified_at)":("[^"]*"|\d+)', r'"\1":0'),
)


def exchanged(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, str, str, str]:
    answer = client.post(path, json=body)
    text = answer.text
    for pattern, shown in _MASKS:
        text = re.sub(pattern, shown, text)
    warning = answer.headers.get("x-minisgl-warning", "")
    return answer.status_code, answer.headers["content-type"], warning, text


@pytest.mark.parametrize("stream", [False, True])
def test_its_answers_are_those_of_the_server_itself(
    gateway: AppThread, server: ScriptedServer, stream: bool
) -> None:
    with (
        httpx.Client(base_url=gateway.url, timeout=60) as before,
        httpx.Client(base_url=server.url, timeout=60) as itself,
    ):
        for path, body in CASES:
            asked = {**body, "stream": stream}
            assert exchanged(before, path, asked) == exchanged(itself, path, asked), asked


def test_it_counts_tokens_and_lists_models_as_the_server_does(
    gateway: AppThread, server: ScriptedServer
) -> None:
    body = {"messages": said("one two three"), "system": "s", "tools": [TOOL]}
    for url in (gateway.url, server.url):
        count = httpx.post(f"{url}/v1/messages/count_tokens", json=body).json()
        assert count == {"input_tokens": 3}
    assert server.encoded[-1] == server.encoded[-2]
    shown = httpx.get(f"{gateway.url}/api/tags").json()["models"]
    assert [model["name"] for model in shown] == [MODEL, "also-scripted"]
    about, own = (ollama.Client(url).show(f"{MODEL}:latest") for url in (gateway.url, server.url))
    assert (about.parameters, about.capabilities) == (own.parameters, own.capabilities)


def test_an_answer_is_kept_for_the_key_that_asked(gateway: AppThread) -> None:
    kept = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="mine")
    first = kept.responses.create(model=MODEL, input="one")
    second = kept.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert second.output_text == "two ."
    other = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="theirs", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(first.id)


def test_a_client_that_leaves_ends_the_upstreams_request(
    gateway: AppThread, server: ScriptedServer
) -> None:
    num_aborted = len(server.aborted)
    body = {"max_tokens": 9999, "messages": said("!forever"), "stream": True}
    with httpx.stream("POST", gateway.url + MESSAGES, json=body) as stream:
        next(stream.iter_bytes())
    assert len(server.wait_aborted(num_aborted + 1)) == num_aborted + 1
    num_received = len(server.received)
    ask_and_leave(
        gateway.url + RESPONSES,
        {"input": "one !hang"},
        lambda: len(server.received) > num_received,
    )
    assert len(server.wait_aborted(num_aborted + 2)) == num_aborted + 2


def test_foreign_pages_and_names_are_refused(gateway: AppThread) -> None:
    for headers, code in (
        ({"Origin": "http://evil.example"}, "foreign_page"),
        ({"Host": "evil.example"}, "unknown_host"),
    ):
        body = {"max_tokens": 5, "messages": said("one")}
        refused = httpx.post(gateway.url + MESSAGES, json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
    long = httpx.post(gateway.url + CHAT, content=b" " * (2**24 + 1), headers={"a": "b"})
    assert (long.status_code, "bytes" in long.json()["error"]) == (413, True)


def test_an_upstream_that_is_gone_is_named() -> None:
    with gateway_before("http://127.0.0.1:9") as gateway:
        refused = httpx.post(gateway.url + MESSAGES, json={"max_tokens": 5, "messages": said("a")})
        assert refused.status_code == 502
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("api_error", "upstream_failed")
        assert "127.0.0.1:9 failed before it answered" in error["message"]


def whole(asked: dict[str, Any]) -> Response:
    message = {"role": "assistant", "content": "hello", "annotations": []}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "more": 1}
    return JSONResponse({"id": "x", "choices": [choice], "usage": usage, "timings": {"a": 1}})


def test_a_plain_server_gets_openais_fields_alone() -> None:
    with PlainUpstream(whole) as plain, gateway_before(f"{plain.url}/v1", "secret") as gateway:
        claude = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
        answer = claude.messages.with_raw_response.create(
            model="plain",
            max_tokens=7,
            messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            extra_body={"top_k": 4},
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_headers={"X-Request-Id": "mine"},
        )
        assert plain.received[-1] == {
            "model": "plain",
            "max_tokens": 7,
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        }
        assert plain.headers["authorization"] == "Bearer secret"
        assert plain.headers["x-request-id"] == "mine"
        assert answer.headers["x-minisgl-warning"] == (
            "left out: thinking.budget_tokens, top_k, continue_final_message, thinking.type"
        )
        message = answer.parse()
        assert [block.text for block in message.content if block.type == "text"] == ["hello"]
        assert (message.usage.input_tokens, message.stop_reason) == (3, "end_turn")
        counted = httpx.post(
            f"{gateway.url}/v1/messages/count_tokens", json={"messages": said("a")}
        )
        assert counted.status_code == 501


def test_a_plain_server_gets_pictures() -> None:
    """It says itself whether its model reads them. This project's says so in its list."""
    with PlainUpstream(whole) as plain, gateway_before(plain.url) as gateway:
        ollama.Client(gateway.url).chat("plain", [{**said("look")[0], "images": ["aGk="]}])
        url = {"type": "image_url", "image_url": {"url": "data:image/*;base64,aGk="}}
        assert plain.received[-1]["messages"] == [
            {"role": "user", "content": [url, {"type": "text", "text": "look"}]}
        ]
    for capabilities, expected in ((["completion"], False), (["completion", "vision"], True)):
        entry = _Entry(id="a", owned_by=OWNER, capabilities=capabilities)
        assert entry.model.abilities.reads_images is expected


def test_fields_that_the_operator_names_are_passed_on() -> None:
    with PlainUpstream(whole) as plain, gateway_before(plain.url, None, ("top_k",)) as gateway:
        client = ollama.Client(gateway.url, headers={"Authorization": "Bearer mine"})
        answer = client.chat("plain", said("a"), options={"top_k": 3, "min_p": 0.5})
        assert answer.message.content == "hello"
        assert (plain.received[-1]["top_k"], "min_p" in plain.received[-1]) == (3, False)
        assert plain.headers["authorization"] == "Bearer mine"


def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], 'usage': None})}\r\n\r\n"


def call(index: int, id: str = "c", **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}


USAGE = 'data: {"choices":null,"usage":{"prompt_tokens":5,"completion_tokens":6}}\n\n'
STREAM = (
    ": a comment\n\n",
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "hm"})[:9],
    chunk({"reasoning": "hm"})[9:] + chunk({"content": "é"}),
    # Some servers count calls from 1, or by the place of the tool.
    chunk(call(1, name="f", arguments="")) + chunk(call(1, arguments='{"a":')),
    chunk(call(1, arguments="1}")) + chunk(call(3, name="g", arguments="{}")),
    chunk({}, "tool_calls") + USAGE + "data: [DONE]\n\n",
)


def test_a_plain_servers_stream_becomes_each_vendors() -> None:
    with PlainUpstream(lambda _: streamed(*STREAM)) as plain, gateway_before(plain.url) as gateway:
        claude = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": "plain", "max_tokens": 50, "messages": said("a")}
        with claude.messages.stream(**asked) as stream:
            message = stream.get_final_message()
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[2].model_dump()["input"] == {"a": 1}
        assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 6)
        assert message.stop_reason == "tool_use"
        assert plain.received[-1]["stream_options"] == {"include_usage": True}
        lines = list(ollama.Client(gateway.url).chat("plain", said("a"), stream=True))
        assert "".join(line.message.content or "" for line in lines) == "é"
        calls = [one for line in lines for one in line.message.tool_calls or ()]
        assert [one.function.name for one in calls] == ["f", "g"]
        assert (lines[-1].done_reason, lines[-1].eval_count) == ("stop", 6)
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
        *_, last = client.responses.create(model="plain", input="a", stream=True)
        assert last.type == "response.completed"
        assert [item.type for item in last.response.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (STREAM[:4], "ended within its answer"),
        ((STREAM[1], 'data: {"error": {"message": "no memory"}}\n\n'), "no memory"),
        ((STREAM[1], 'data: {"error": "no memory"}\n\n'), "no memory"),
        ((STREAM[1], "data: <html>\n\n"), "not one of chat completions"),
        ((chunk(call(0, name="f")), chunk(call(1, name="g")), chunk(call(0))), "mixes the pieces"),
        ((chunk(call(-1, arguments="{}")),), "not one of chat completions"),
    ],
)
def test_a_stream_that_fails_ends_with_the_error(lines: tuple[str, ...], message: str) -> None:
    with PlainUpstream(lambda _: streamed(*lines)) as plain, gateway_before(plain.url) as gateway:
        body = {"max_tokens": 5, "messages": said("a"), "stream": True}
        *_, last = httpx.post(gateway.url + MESSAGES, json=body).text.strip().split("\n")
        error = json.loads(last.removeprefix("data: "))
        assert (error["type"], message in error["error"]["message"]) == ("error", True), last


class Silent(Response):
    """Sends nothing, or only a head and a piece, until the client leaves."""

    def __init__(self, first: str = "") -> None:
        super().__init__()
        self._first = first.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._first:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass


def answered(answer: Response, *, stream: bool, silent_s: float = 60.0) -> tuple[int, str]:
    """Return the status and the error's message that a client of Messages gets for an upstream's
    answer."""
    body = {"model": "m", "max_tokens": 5, "messages": said("a"), "stream": stream}
    plain = PlainUpstream(lambda _: answer)
    with plain, gateway_before(plain.url, silent_s=silent_s) as gateway:
        told = httpx.post(gateway.url + MESSAGES, json=body)
    *_, last = told.text.strip().split("\n")
    return told.status_code, json.loads(last.removeprefix("data: "))["error"]["message"]


NO_LIST = b"HTTP/1.1 404 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def of_bytes(answer: bytes, *, stream: bool) -> tuple[int, str]:
    """Return what a client of Messages gets for an upstream's answer, byte for byte as given."""

    def serve() -> None:
        with suppress(OSError):  # at the end of the test
            while True:
                client, _ = listening.accept()
                with client:
                    is_list = client.recv(2**16).startswith(b"GET")
                    client.sendall(NO_LIST if is_list else answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        with gateway_before(f"http://127.0.0.1:{listening.getsockname()[1]}") as gateway:
            body = {"model": "m", "max_tokens": 5, "messages": said("a"), "stream": stream}
            found = httpx.post(gateway.url + MESSAGES, json=body, timeout=20)
        listening.shutdown(socket.SHUT_RDWR)
    return found.status_code, found.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_without_a_length_ends_with_its_connection(stream: bool) -> None:
    """As servers of HTTP/1.0 write it, such as Flask's own."""
    message = {"message": {"content": "hi"}, "finish_reason": "stop"}
    body = "".join(STREAM) if stream else json.dumps({"choices": [message]})
    kind = "text/event-stream" if stream else "application/json"
    head = f"HTTP/1.0 200 OK\r\ncontent-type: {kind}\r\n\r\n"
    status, text = of_bytes((head + body).encode(), stream=stream)
    assert (status, '"stop_reason":"' in text, '"error"' in text) == (200, True, False), text


@pytest.mark.parametrize("kept", [False, True])
def test_a_request_is_sent_again_only_after_a_kept_connection_ends(kept: bool) -> None:
    """An upstream that dies of a request does not get it twice."""
    asked = list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(2**16):
            asked.append(head)
            if not (kept and len(asked) == 1):
                break
            writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            chat = UpstreamChat(f"http://127.0.0.1:{port}", None)
            if kept:
                (await chat._sent("POST", "/", [], b"")).close()
            with pytest.raises(router_upstream.ReplicaFailed):
                await chat._sent("POST", "/", [], b"")

    asyncio.run(run())
    assert len(asked) == (3 if kept else 1)


def test_counts_stay_when_a_later_chunk_has_none() -> None:
    reader = Reader()
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    reader.read(json.dumps({"choices": [{"finish_reason": "stop"}], "usage": usage}).encode())
    reader.read(b'{"choices": []}')
    assert reader.end().usage.total_tokens == 5


def test_calls_of_one_number_are_told_apart_by_their_ids() -> None:
    """Ollama counts each call as 0. SGLang gave each piece of a call an ID of its own."""
    reader = Reader()
    deltas = [
        call(0, "a", name="f", arguments="{}"),
        call(0, "b", name="f", arguments="{"),
        call(0, "c", arguments="}"),
        call(0, "b", name="f", arguments=" "),
    ]
    pieces = [chunk(delta).removeprefix("data: ").encode() for delta in deltas]
    parts = [part for piece in pieces for part in reader.read(piece).parts]
    assert [kind for kind, _ in parts] == ["call", "arguments", "call", *["arguments"] * 3]


def test_each_key_has_its_own_list_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = UpstreamChat("http://127.0.0.1:9", None)

    async def ask(request: Any, target: str, fields: object) -> str:
        return str(request.headers["x-api-key"])

    async def body(answer: str, request: object) -> bytes:
        return json.dumps({"data": [{"id": f"of {answer}"}]}).encode()

    async def names(key: str) -> list[str]:
        request: Any = SimpleNamespace(headers=Headers({"x-api-key": key}))
        return [model.name for model in await chat.models(request)]

    monkeypatch.setattr(chat, "_ask", ask)
    monkeypatch.setattr(chat, "_body", body)
    found = [asyncio.run(names(key)) for key in ("alice", "bob", "alice")]
    assert found == [["of alice"], ["of bob"], ["of alice"]]


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        (b"HTTP/1.1 999 X\r\ncontent-length: 4\r\n\r\nbusy", 502, "busy"),
        (b"HTTP/1.1 400 X\r\ncontent-length: 90000\r\n\r\n" + b"[" * 90000, 400, "[["),
        (b"HTTP/1.1 200 X\r\n\r\n{", 502, "not one of chat completions"),
    ],
    ids=["status", "depth", "json"],
)
def test_an_odd_answer_is_an_error(answer: bytes, status: int, why: str) -> None:
    told = of_bytes(answer, stream=False)
    assert (told[0], why in told[1]) == (status, True), told


def test_an_answer_that_is_too_large_is_a_502(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_WHOLE", 2**20)
    for answer in (JSONResponse("x" * 2**21), JSONResponse("x" * 2**21, 400)):
        told = answered(answer, stream=False)
        assert told == (502, "the upstream's answer exceeds 1 MiB")


def test_a_stream_that_is_too_large_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE", 2**18)
    monkeypatch.setattr(reading, "MAX_STREAM", 2**20)
    monkeypatch.setattr(router_upstream, "MAX_CHUNK", 2**19)
    long, text = 'data: {"choices": [{"delta": {"content": "', chunk({"content": "x" * 2**17})
    for lines, why in (
        ([long, *["x" * 2**16] * 8], "a line of the upstream's stream exceeds 0.25 MiB"),
        ([text] * 10, "the upstream's answer exceeds 1 MiB"),
        (["\n" * 2**20], "a chunk of the answer exceeds 524288 bytes"),
    ):
        assert why in answered(streamed_from(iter(lines)), stream=True)[1]


def test_a_head_that_is_too_large_is_a_502(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_upstream, "MAX_HEAD", 1000)
    status, message = answered(JSONResponse({}, headers={"x-long": "x" * 2000}), stream=False)
    assert (status, "a head of the answer exceeds 1000 bytes" in message) == (502, True), message


@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_that_is_silent_is_given_up(stream: bool) -> None:
    answer = Silent(chunk({"content": "a"}) if stream else "")
    status, message = answered(answer, stream=stream, silent_s=0.5)
    assert status == (200 if stream else 502)
    assert message.startswith("the upstream sent nothing for 0.5 s; ask for a stream")


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (
            400,
            {"error": {"message": "no", "param": "messages", "code": None}},
            "invalid_request_error",
        ),
        (401, {"error": {"message": "no", "code": "invalid_api_key"}}, "authentication_error"),
        (429, {"object": "error", "message": "no", "code": 429}, "rate_limit_error"),
        (503, "no", "api_error"),
        (302, "no", "api_error"),
    ],
)
def test_a_refusal_has_the_vendors_form(status: int, body: Any, kind: str) -> None:
    def refuse(asked: dict[str, Any]) -> Response:
        return JSONResponse(body, status, {"retry-after": "7"})

    with PlainUpstream(refuse) as plain, gateway_before(plain.url) as gateway:
        asked = {"max_tokens": 5, "messages": said("a")}
        refused = httpx.post(gateway.url + MESSAGES, json=asked)
        error = refused.json()["error"]
        status = 502 if status == 302 else status
        assert (refused.status_code, error["type"]) == (status, kind)
        assert "no" in error["message"]
        assert refused.headers.get("retry-after") == ("7" if status in (429, 503) else None)
        shown = httpx.post(gateway.url + CHAT, json={"model": "plain", "messages": said("a")})
        assert (shown.status_code, list(shown.json())) == (status, ["error"])


def test_the_command_serves_until_it_is_ended(server: ScriptedServer) -> None:
    """What is open when it ends has an error as its end."""
    flags = ["--port", "0", "--upstream", server.url, "--drain-timeout", "0.2"]
    command = [sys.executable, "-m", "minisgl", "gateway", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = next(line for line in process.stdout if "Ctrl-C" in line).split()[1]
        body = {"model": MODEL, "max_tokens": 9, "messages": said("!forever"), "stream": True}
        with httpx.stream("POST", url + MESSAGES, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "overloaded_error"
        assert process.wait(60) == 0


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:99999999", "http://a..b"])
def test_what_is_no_server_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gateway_command(["--upstream", url], 0.0) == 1
    assert f"--upstream {url}: must be the address of a server" in capsys.readouterr().err


def test_a_client_that_does_not_read_stops_the_upstream() -> None:
    sent = threading.Event()

    def endless(asked: dict[str, Any]) -> Response:
        def lines() -> Iterator[str]:
            for _ in range(4000):  # 40 MB, more than all buffers on the way
                yield chunk({"content": "x" * 10_000})
            sent.set()

        return streamed_from(lines())

    with PlainUpstream(endless) as plain, gateway_before(plain.url) as gateway:
        body = {"model": "plain", "messages": said("a")}
        with httpx.stream("POST", gateway.url + CHAT, json=body) as stream:
            next(stream.iter_bytes())
            assert not sent.wait(1.0)
