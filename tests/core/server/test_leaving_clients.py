"""A client that leaves aborts its requests."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from helpers.api_requests import chat
from helpers.scripted_server import ScriptedServer
from helpers.waiting import ask_and_leave, until
from minisgl.server.observe import Observer


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
    num_received = len(server.received)
    ask_and_leave(
        f"{server.url}/v1/chat/completions",
        chat(text, stream=stream),
        lambda: len(server.received) > num_received,
    )
    assert len(server.wait_aborted(before + 1)) == before + 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_client_that_leaves_within_its_body_is_not_an_error(path: str, caplog: Any) -> None:
    observer = Observer()
    with ScriptedServer(observer=observer) as server:
        address = urlsplit(server.url)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_with_a_request_behind_aborts_the_one_that_is_answered(
    server: ScriptedServer, stream: bool
) -> None:
    """uvicorn tells only the last request of a connection that its client has left, and reads no
    more behind a second request."""
    num_aborted, num_received = len(server.aborted), len(server.received)
    body = json.dumps({"prompt": "!forever", "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    behind = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: len(server.received) > num_received)
        client.sendall(behind)
        time.sleep(0.1)  # it is read
        assert not stream or client.recv(1000)
    assert len(server.wait_aborted(num_aborted + 1, timeout_s=5)) == num_aborted + 1
