"""What HTTP asks of every path: HEAD, upgrades, request ids, errors of the server, the schema."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from helpers.api_requests import chat
from helpers.scripted_server import ScriptedServer
from minisgl.server.web.guards import RequestIds
from minisgl.version import __version__


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
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Upgrade: h2c\r\nContent-Length: %d\r\nUpgrade: web" % len(body)
    )
    with raw_connection(server) as client:
        exchange(client, [head, b"socket\r\n\r\n" + body])


@pytest.mark.parametrize("wish", [b"h2c", b"websocket"])
def test_an_upgrade_header_does_not_lose_the_body(server: ScriptedServer, wish: bytes) -> None:
    """Requests of Java's HttpClient, in one piece and in two; and a body that looks like one."""
    body = b'{"prompt": "a\\r\\nUpgrade: h2c", "max_tokens": 2}'
    fields = (
        b"Host: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\n"
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
    assert schema["info"] == {"title": "Mini-SGLang", "version": __version__}
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


def test_the_id_of_a_request_is_open_until_its_end() -> None:
    """A router asks for the open ones, and a server has any number of requests."""
    open_ids, seen = Counter[str](), list[dict[str, int]]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(dict(open_ids))

    ids: Any = RequestIds(app, open_ids)
    scope = {"type": "http", "method": "GET", "headers": [(b"x-request-id", b"mine")]}
    asyncio.run(ids(scope, None, None))
    assert (seen, dict(open_ids)) == ([{"mine": 1}], {})
