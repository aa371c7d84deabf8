"""Connections beyond the bound, HTTP/1.0, and Expect: 100-continue."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.key_files import FILE, SECRET, key_file, key_ring
from helpers.scripted_server import ScriptedServer
from minisgl.server.web import connections as module
from minisgl.server.web import http as http_module
from minisgl.server.web.connections import EXTRA, Connections, client_address
from minisgl.server.web.http import HttpServer

MOST = 6


class Recorded:
    """A connection that notes that it was displaced."""

    def __init__(self, address: str, displaced: list[Any]) -> None:
        self.address, self._displaced = address, displaced

    def displace(self) -> None:
        self._displaced.append(self)


def test_a_client_displaces_its_own_connections() -> None:
    displaced: list[Any] = []
    connections = Connections(5)
    one, *many = [Recorded(name, displaced) for name in "abbbb"]
    for connection in (one, *many):
        assert connections.make_room()
        connections.add(connection)
    connections.serve(many[0])
    connections.wait(many[1])  # its request has ended: it waits from now on
    for expected in (many[2], many[3], one):
        assert connections.make_room()
        assert displaced.pop() is expected
        connections.add(new := Recorded("c", displaced))
        connections.serve(new)
    connections.remove(many[2])  # again
    assert connections.make_room()
    assert displaced == [many[1]]


def test_above_the_bound_only_a_few_are_accepted() -> None:
    connections = Connections(2)
    for _ in range(2 + EXTRA):
        assert connections.make_room()
        connections.add(connection := Recorded("a", []))
        connections.serve(connection)
    assert connections.is_over
    assert connections.is_full
    assert not connections.make_room()
    connections.wait(connection)
    assert not connections.is_full


def test_the_address_of_a_client() -> None:
    assert client_address("10.0.0.1") == client_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_address("2001:db8::1") == client_address("2001:db8::2:0:0:1%eth0")
    assert client_address("2001:db8::1") != client_address("2001:db8:0:1::1")
    assert client_address("") == ""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "most_connections", lambda per_connection: MOST)


def connect(server: ScriptedServer, stack: ExitStack) -> socket.socket:
    url = httpx.URL(server.url)
    return stack.enter_context(socket.create_connection((url.host, url.port or 0), timeout=60))


def closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("is_tls", [False, True])
def test_silent_connections_give_way(
    few: None, is_tls: bool, certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a handshake a connection waits as well."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    with ExitStack() as stack:
        server = stack.enter_context(ScriptedServer(tls=tls if is_tls else None))
        silent = [connect(server, stack) for _ in range(3 * MOST)]
        verify: Any = ssl.create_default_context(cafile=certificate[0]) if is_tls else True
        for _ in range(2):
            assert httpx.get(f"{server.url}/health", verify=verify).status_code == 200
        assert all(closed(client) for client in silent[: 2 * MOST])
        silent[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
    assert caplog.text.count("connections are open") == 1


def test_what_speaks_no_tls_is_forgotten(
    few: None, certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    with ExitStack() as stack:
        server = stack.enter_context(ScriptedServer(tls=tls))
        for _ in range(2 * MOST):
            plain = connect(server, stack)
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while not closed(plain):
                pass
    assert "connections are open" not in caplog.text


def test_a_request_is_not_displaced(few: None) -> None:
    """With all connections taken, probes are answered and other requests get a 503."""
    texts: list[str] = []

    def ask() -> None:
        body = {"prompt": "a !pause b", "max_tokens": 3}
        texts.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text)

    with ExitStack() as stack:
        server = stack.enter_context(ScriptedServer())
        askers = [threading.Thread(target=ask) for _ in range(MOST)]
        for asker in askers:
            asker.start()
        while len(server.received) < MOST:
            time.sleep(0.01)
        for _ in range(2 * EXTRA):
            connect(server, stack)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["retry-after"] == "1"
        for path in ("/health", "/ready"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        server.resumed.set()
        for asker in askers:
            asker.join(60)
    assert len(texts) == MOST
    assert all('"finish_reason":"stop"' in text for text in texts)


def test_a_process_with_few_descriptors_answers_beside_silent_connections(tmp_path: Path) -> None:
    """A router needs no model. Its log has one line for all connections."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "minisgl", "route", "--port", "0"]
    command += ["--replica", "http://127.0.0.1:9"]
    limited = ["bash", "-c", 'ulimit -n 256 && exec "$@"', "bash", *command]
    with ExitStack() as stack, log.open("w") as output:
        router = subprocess.Popen(limited, stdout=output, stderr=output)
        stack.callback(router.wait, 60)
        stack.callback(router.terminate)
        deadline = time.monotonic() + 100
        while not (found := re.search(r"Routing http://127.0.0.1:(\d+)", log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert "to 1 server, of which 0 are up" in log.read_text()
        port = int(found[1])
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        answer = httpx.get(f"http://127.0.0.1:{port}/replicas", timeout=15)
        assert answer.json() == {"replicas": [{"name": "127.0.0.1:9", "up": False}]}
        assert len(log.read_text().splitlines()) < 20


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(keys=key_ring(key_file(tmp_path, FILE))) as server:
        yield server


def exchange(server: ScriptedServer, *parts: bytes) -> bytes:
    """Send the parts, and return what comes until the server closes the connection."""
    with ExitStack() as stack:
        client = connect(server, stack)
        for part in parts:
            client.sendall(part)
        return b"".join(iter(lambda: client.recv(65536), b""))


def request(version: str, body: bytes, *headers: str) -> bytes:
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "host: localhost",
        "content-type: application/json",
    ]
    lines += [f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_http_1_0_gets_a_plain_body(server: ScriptedServer, stream: bytes) -> None:
    body = b'{"prompt": "one two", "stream": %b}' % stream
    answer = exchange(server, request("1.0", body), body)
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head.lower()
    if stream == b"true":
        assert re.fullmatch(rb"(data: \{.*\}\n\n)+data: \[DONE\]\n\n", content), content
    else:
        assert b"content-length: %d\r\n" % len(content) in head
    for method, path in (("HEAD", "/health"), ("GET", "/metrics")):
        head, _, content = exchange(server, f"{method} {path} HTTP/1.0\r\n\r\n".encode()).partition(
            b"\r\n\r\n"
        )
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert bool(content) == (method == "GET")


def test_the_body_is_asked_for_once_the_key_is_checked(guarded: ScriptedServer) -> None:
    body, expect = b'{"prompt": "one"}', "expect: 100-continue"
    key = f"authorization: Bearer {SECRET}"
    refused = exchange(guarded, request("1.1", body, expect))
    assert refused.startswith(b"HTTP/1.1 401 "), "and the connection is closed"
    assert b"connection: close\r\n" in refused
    with ExitStack() as stack:
        client = connect(guarded, stack)
        client.sendall(request("1.1", body, expect, key, "connection: close"))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    old = exchange(guarded, request("1.0", body, expect, key), body)
    assert old.startswith(b"HTTP/1.1 200 OK\r\n"), "HTTP/1.0 has no 100"


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    code = (
        "import resource as r; from minisgl.server.web.connections import most_connections as m;"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (200, hard));"
        "one, two = m(), m(2); print(r.getrlimit(r.RLIMIT_NOFILE), one, two)"
    )
    limited = ["bash", "-c", 'ulimit -n 1000 && exec "$@"', "bash", sys.executable, "-c", code]
    done = subprocess.run(limited, capture_output=True, text=True, check=True)
    soft, hard, one, two = map(int, re.findall(r"\d+", done.stdout))
    assert (soft, hard) == (1000, 1000)
    assert 1000 - module.RESERVE - 50 < one < 1000 - module.RESERVE
    assert two == one // 2


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hi"})


ASKS = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def test_another_process_goes_on_with_idle_connections() -> None:
    """One within a request stays, and closes after its answer if that is asked for. What waits at
    the socket is left for the other process."""

    async def run() -> None:
        http = HttpServer(_hello)
        listening = socket.create_server(("127.0.0.1", 0))
        started = asyncio.Event()
        serving = asyncio.create_task(http.serve_on(listening, started.set))
        await started.wait()

        async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection(*listening.getsockname())

        idle, idle_out = await connected()
        idle_out.write(ASKS)
        assert (await idle.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
        busy, busy_out = await connected()
        busy_out.write(ASKS + ASKS[:9])  # half of the next request
        await busy.readuntil(b"hi")

        released = [each.release() for each in http.connections.waiting]
        (taken,) = [each for each in released if each]
        assert taken.getpeername() == idle_out.get_extra_info("sockname")
        taken.send(b"from another process")
        assert await idle.readexactly(20) == b"from another process"
        taken.close()

        http.leave(listening, closes=True)
        _, late_out = await connected()
        busy_out.write(ASKS[9:])
        assert b"\r\nconnection: close\r\n" in await busy.read()
        client, _ = listening.accept()
        assert client.getpeername() == late_out.get_extra_info("sockname")
        client.close()
        http.should_exit = True
        await serving
        for writer in (idle_out, busy_out, late_out):
            writer.close()

    asyncio.run(run())
