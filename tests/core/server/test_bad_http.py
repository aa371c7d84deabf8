"""Requests that are wrong as HTTP: headers, encodings, sizes, slow bodies, other protocols."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from openai.types.shared.error_object import ErrorObject

from helpers.api_requests import CHAT, GENERATE, TEXT, hello, refused
from helpers.scripted_server import ScriptedServer
from minisgl.server.web import body as bodies
from minisgl.server.web.body import MAX_VALUES


def test_half_a_body_times_out(
    http: httpx.Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly() -> Iterator[bytes]:
        for piece in (b'{"text": "a",', b'"max_tokens": 1,', b' "seed": 1,', b'"min_p": 3}'):
            yield piece
            server.pass_time(0.4 * bodies.MAX_PAUSE_S)

    headers = {"content-type": "application/json"}
    assert refused(http.post(GENERATE, content=slowly(), headers=headers))["param"] == "min_p"
    monkeypatch.setattr(bodies, "MAX_PAUSE_S", 0.3)
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as client:
        client.settimeout(60)
        client.sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n")
        client.sendall(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n")
        client.sendall(b'{"te')
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in answer


def exchange(http: httpx.Client, sent: bytes) -> bytes:
    """Return what the server answers until it closes the connection."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as client:
        client.settimeout(60)
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(("length", "ends"), [(70_000, False), (70_000, True), (60_000, True)])
def test_endless_headers_are_refused(http: httpx.Client, length: int, ends: bool) -> None:
    """Headers that end within the limit are accepted. Those above it may come in one read."""
    sent = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"a" * length
    answer = exchange(http, sent + b"\r\nconnection: close\r\n\r\n" if ends else sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    is_accepted = length < 65_536
    assert head.startswith(b"HTTP/1.1 200 OK" if is_accepted else b"HTTP/1.1 431 Request Header")
    if not is_accepted:
        assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert http.get("/health").status_code == 200


def test_a_long_path_that_comes_in_one_read_is_refused_by_its_length(http: httpx.Client) -> None:
    answer = exchange(http, b"GET /v1/models?" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


def test_requests_that_are_sent_ahead_of_their_answers(http: httpx.Client) -> None:
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    few = (one + b"\r\n") * 16 + one + b"connection: close\r\n\r\n"
    assert exchange(http, few).count(b"HTTP/1.1 200 OK") == 17
    with pytest.raises(ConnectionResetError):
        exchange(http, (one + b"\r\n") * 18)
    assert http.get("/health").status_code == 200


def test_requests_behind_answers_that_are_computed(http: httpx.Client) -> None:
    """Each is answered, in order: behind a whole answer, a refusal and a stream."""
    asked = [
        (CHAT, hello()),
        (CHAT, {"messages": 1}),
        (CHAT, hello(stream=True)),
        (GENERATE, {"text": "a"}),
    ]
    sent = b""
    for number, (path, body) in enumerate(asked):
        data, is_last = json.dumps(body).encode(), number == len(asked) - 1
        sent += f"POST {path} HTTP/1.1\r\nhost: localhost\r\n".encode()
        sent += b"content-type: application/json\r\n" + b"connection: close\r\n" * is_last
        sent += b"content-length: %d\r\n\r\n%b" % (len(data), data)
    answers = exchange(http, sent).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"400", b"200", b"200"]
    for answer, has in zip(
        answers, (b"chat.completion", b"messages", b"[DONE]", b"stop_match"), strict=True
    ):
        assert has in answer


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


def test_a_body_of_too_many_values(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for values in (
        b"1," * (MAX_VALUES + 1) + b"1",
        b"[]," * (MAX_VALUES + 1) + b"[]",
        (b"[" * 500 + b"]" * 500 + b",") * (MAX_VALUES // 500) + b"[]",
        b'{"a":[{}]},' * (MAX_VALUES // 18) + b"{}",
    ):
        error = refused(http.post(TEXT, content=b'{"prompt": [%b]}' % values, headers=headers), 413)
        assert "has more than 1,048,576 values" in error["message"]
    messages = b'{"role": "user", "content": "a"},' * 120_000
    error = refused(
        http.post(CHAT, content=b'{"messages": [%b{}]}' % messages, headers=headers), 413
    )
    assert "(an object counts as 8)" in error["message"]
    marks = b"[,{" * (MAX_VALUES // 3 + 1)
    text = b'\\"\\\\' + marks  # behind an escaped quote and an escaped backslash
    accepted = http.post(TEXT, content=b'{"prompt": "%b", "max_tokens": 1}' % text, headers=headers)
    assert accepted.status_code == 200


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    for path in ("/v1/chat", "/pages", "/v1"):
        assert f"nothing at {path}; /docs" in refused(http.post(path), 404)["message"]
    for path in (f"{CHAT}/", f"/v1{CHAT}", "/chat/completions", CHAT[:-1]):
        assert refused(http.post(path), 404)["message"].endswith(f"; did you mean {CHAT}?")
    wrong_method = http.get(CHAT)
    assert "POST" in refused(wrong_method, 405)["message"]
    assert wrong_method.headers["allow"] == "POST"
