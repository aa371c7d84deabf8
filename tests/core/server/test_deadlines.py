"""Requests that take too long, clients that stall, and a server that shuts down."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from helpers.endless import NUM_TOKENS, endless_flags
from helpers.running_server import assert_nothing_left
from helpers.scripted_server import ScriptedServer
from minisgl.server.command import finish_open
from minisgl.server.web import http as http_module
from minisgl.server.web import respond as respond_module


def post(server: ScriptedServer, prompt: str, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("prompt", ["!wait", "!hang", "a !forever", "a b !pause c"], ids=str.split)
def test_a_timeout_ends_a_request_in_each_process(server: ScriptedServer, prompt: str) -> None:
    num_aborted = len(server.aborted)
    began = time.monotonic()
    late = post(server, prompt, timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 60
    assert late.status_code == 504
    assert late.headers["retry-after"] == "1"
    error = late.json()["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "server_error")
    assert "its timeout of 0.3 s" in error["message"]
    assert len(server.wait_aborted(num_aborted + 1)) == num_aborted + 1
    assert server.num_open == 0


def test_a_timeout_is_the_last_event_of_a_stream(
    client: openai.OpenAI, server: ScriptedServer
) -> None:
    num_aborted = len(server.aborted)
    stream = client.completions.create(
        model="scripted", prompt="a b !hang", stream=True, extra_body={"timeout": 30}
    )
    assert [next(stream).choices[0].text for _ in range(2)] == ["a ", "b "]
    server.pass_time(30)
    with pytest.raises(openai.APIError, match="within its timeout"):
        next(stream)
    assert len(server.wait_aborted(num_aborted + 1)) == num_aborted + 1


OTHER_DOORS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "!hang"}], "max_tokens": 9},
    "/v1/responses": {"input": "!hang"},
    "/api/chat": {"model": "scripted", "messages": [{"role": "user", "content": "!hang"}]},
    "/api/generate": {"model": "scripted", "prompt": "!hang"},
}


@pytest.mark.parametrize("path", OTHER_DOORS)
def test_other_api_families_have_timeouts(server: ScriptedServer, path: str) -> None:
    num_aborted = len(server.aborted)
    body = OTHER_DOORS[path] | {"stream": False, "timeout": 0.2}
    late = httpx.post(server.url + path, json=body, timeout=60)
    assert late.status_code == 504
    assert "its timeout of 0.2 s" in late.text
    assert len(server.wait_aborted(num_aborted + 1)) == num_aborted + 1
    short = httpx.post(server.url + path, json=body | {"timeout": 5e-324}, timeout=60)
    assert short.status_code == 400
    assert "timeout" in short.text


@pytest.mark.parametrize("value", [0, 5e-324, -1, 1e9, "5"])
def test_wrong_timeouts_are_refused(server: ScriptedServer, value: Any) -> None:
    assert post(server, "a", timeout=value).json()["error"]["param"] == "timeout"


@pytest.fixture
def reading_nothing(server: ScriptedServer) -> Iterator[Any]:
    """Send a streaming request on a socket, and return the socket. Buffers are small, so that they
    fill at once; the server's sockets have that of its listening socket."""
    sockets: list[socket.socket] = []
    listening = server._bound
    usual = listening.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2  # Linux doubles it
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def send(fields: str) -> socket.socket:
        port = int(server.url.rpartition(":")[2])
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        sockets.append(client)
        body = '{"prompt": "!forever", "n": 64, "stream": true' + fields + "}"
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            + f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        return client

    yield send
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, usual)
    for client in sockets:
        client.close()


def is_cut_off(client: socket.socket, timeout_s: float = 60) -> bool:
    """Read nothing until the server has reset the connection."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return True
        time.sleep(0.02)
    return False


def test_a_client_that_does_not_read_is_disconnected(
    server: ScriptedServer, reading_nothing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "UNREAD_S", 0.3)
    num_aborted = len(server.aborted)
    client = reading_nothing("")
    assert is_cut_off(client)
    assert len(server.wait_aborted(num_aborted + 64)) == num_aborted + 64
    assert server.num_open == 0


def test_a_timeout_ends_a_connection_that_is_not_read(
    server: ScriptedServer, reading_nothing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond_module, "ERROR_READ_S", 0.2)
    num_aborted = len(server.aborted)
    client = reading_nothing(', "timeout": 1.5')
    assert is_cut_off(client)
    assert len(server.wait_aborted(num_aborted + 64)) == num_aborted + 64
    assert server.num_open == 0


ANSWERED = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def ask_health(client: socket.socket) -> None:
    client.sendall(ANSWERED)
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [b"", b"GET /hea", ANSWERED + b"\r\n"], ids=["none", "half", "a blank line"]
)
def test_a_connection_without_a_complete_head_is_closed(
    server: ScriptedServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(http_module, "HEAD_S", 0.2)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            client.settimeout(20)  # less than uvicorn's own wait

            def talk() -> None:
                if sent.startswith(ANSWERED):
                    ask_health(client)
                client.sendall(sent.removeprefix(ANSWERED))
                client.recv(1)

            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                talk()


def test_a_connection_may_be_idle_for_longer_than_a_head(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "HEAD_S", 20.0)  # less than KEEP_ALIVE_S
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.settimeout(60)
        for _ in range(2):
            ask_health(client)
            server.pass_time(25)


def test_a_client_that_reads_again_may_stop_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "UNREAD_S", 600.0)
    protocol = object.__new__(http_module._Protocol)
    flow: Any = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    protocol.flow, protocol.loop = flow, asyncio.new_event_loop()
    try:
        protocol.pause_writing()
        assert protocol._unread_timer
        assert not protocol._unread_timer.cancelled()
        protocol.resume_writing()
        assert protocol._unread_timer.cancelled()
    finally:
        protocol.loop.close()


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_timeout_ends_with_its_answer(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """It must not close a connection, on which the next request may come."""
    monkeypatch.setattr(respond_module, "ERROR_READ_S", 0.0)
    num_aborted = len(server.aborted)
    body = b'{"prompt": "a b", "stream": %b, "timeout": 20}' % stream.encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.settimeout(60)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + head + body)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n" if stream == "true" else b"}"):
            answer += client.recv(65536)
        assert (b"[DONE]" if stream == "true" else b'"a b ."') in answer, answer
        for _ in range(2):  # the timeout, and what may follow it
            server.pass_time(20 / 2 + 1)
        ask_health(client)
    assert (len(server.aborted), server.num_open) == (num_aborted, 0)


# --- the end ----------------------------------------------------------------------


class Reader(threading.Thread):
    """Sends a request and reads the stream to its end. begun: set when a piece has come. tokens:
    their number. error: what ended the stream."""

    def __init__(self, client: openai.OpenAI, max_tokens: int) -> None:
        super().__init__()
        self.tokens, self.error = 0, ""
        self.begun = threading.Event()
        self._client, self._max_tokens = client, max_tokens
        self.start()

    def run(self) -> None:
        try:
            stream = self._client.completions.create(
                model=self._client.models.list().data[0].id,
                prompt="a",
                stream=True,
                max_tokens=self._max_tokens,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            for chunk in stream:
                for choice in chunk.choices:
                    self.tokens += len((choice.model_extra or {}).get("token_ids", []))
                self.begun.set()
        except openai.APIError as error:
            self.error = str(error)
            self.begun.set()


def test_sigterm_lets_running_requests_finish_and_a_second_one_ends_the_server(
    endless: Path, launch: Any
) -> None:
    """One test for one start of a server. A drain that ends in time: test_processes.py."""
    server = launch(*endless_flags(endless), "--drain-timeout", "600", "--hang-timeout", "600")
    with server.client() as client:
        family = server.family()
        other = Reader(client, NUM_TOKENS)
        assert other.begun.wait(60)
        os.kill(server.pid("detokenizer"), signal.SIGSTOP)  # no answer goes on
        reader = Reader(client, 60)
        server.wait_open(2)
        server.process.terminate()
        server.wait_for("(draining: 2 requests)", "err")
        refused = httpx.get(f"{server.url}/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert httpx.get(f"{server.url}/health").status_code == 200
        with pytest.raises(openai.InternalServerError, match="is shutting down") as late:
            client.completions.create(model="endless", prompt="b", max_tokens=1)
        assert late.value.response.headers["retry-after"] == "1"
        os.kill(server.pid("detokenizer"), signal.SIGCONT)
        reader.join(120)
        assert (reader.error, reader.tokens) == ("", 60)
        assert other.is_alive()
        server.process.terminate()
        other.join(60)
        assert server.ended() == 128 + signal.SIGTERM
        assert other.error
    assert_nothing_left(server, family)


def test_a_drain_ends_with_its_last_request() -> None:
    num_open = iter([2, 2, 1, 0, 0])
    asyncio.run(asyncio.wait_for(finish_open(num_open.__next__, 600.0), 30))
    assert not list(num_open)
