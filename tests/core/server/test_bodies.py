"""Bodies that come slowly or never, and the memory that they take."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from helpers.api_requests import CHAT, TEXT
from helpers.key_files import FILE, OTHER, SECRET, key_file, key_ring
from helpers.scripted_server import ScriptedServer
from minisgl.errors import InvalidRequest
from minisgl.server.web import body as body_module
from minisgl.server.web import body as module
from minisgl.server.web.body import FREE_BYTES, Bodies

KIB = 2**10


@contextmanager
def sending(url: str, num_bytes: int, *headers: str, sent: bytes = b"") -> Iterator[socket.socket]:
    """A connection on which a request with so long a body has begun."""
    lines = [f"POST {TEXT} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    lines += [f"content-length: {num_bytes}", "", ""]
    parts = httpx.URL(url)
    with socket.create_connection((parts.host, parts.port or 0), timeout=60) as client:
        client.sendall("\r\n".join(lines).encode() + sent)
        yield client


def answer_of(client: socket.socket) -> tuple[bytes, dict[str, str]]:
    """Return the head of the answer and its error. The request's body is not complete."""
    answer = b""
    while not answer.endswith(b"}}"):
        piece = client.recv(65536)
        assert piece, answer
        answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, json.loads(body)["error"]


def test_an_owner_takes_at_most_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_S", 0.1)

    async def run() -> None:
        bodies = Bodies()
        bodies.most = 100
        await bodies.take("a", 50)
        with pytest.raises(InvalidRequest) as refused:
            await bodies.take("a", 1)
        assert (refused.value.status, refused.value.code) == (503, "too_many_bodies")
        await bodies.take("b", 25)
        with pytest.raises(InvalidRequest):
            await bodies.take("b", 1)
        await bodies.take("c", 12)
        bodies.give_back("a", 50)
        await bodies.take("b", 10)

    asyncio.run(run())


def test_a_body_waits_for_room() -> None:
    async def run() -> None:
        bodies = Bodies()
        bodies.most = 100
        with bodies.reading("a") as one, bodies.reading("a") as free:
            await one(FREE_BYTES + 40)
            await free(FREE_BYTES)
            other = asyncio.create_task(bodies.take("a", 40))
            await asyncio.sleep(0.01)
            assert not other.done()
            with bodies.reading("b") as small:
                await small(FREE_BYTES + 20)
        await other
        bodies.give_back("a", 40)
        await bodies.take("b", 50)

    asyncio.run(run())


def routed(stack: ExitStack, urls: list[str], key: str | None = None) -> str:
    """Return the address of a router, whose package may be absent."""
    from helpers.router_thread import RouterThread

    return stack.enter_context(RouterThread(urls, key=key)).url


def drip(client: socket.socket, until: Callable[[], object]) -> None:
    while not until():
        try:
            client.sendall(b" ")
        except OSError:
            return
        time.sleep(0.05)


@pytest.mark.parametrize(
    "is_routed", [False, pytest.param(True, marks=pytest.mark.needs("minisgl_gateway"))]
)
def test_a_body_that_drips_has_an_end(is_routed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "WHOLE_S", 0.5)
    with ExitStack() as stack:
        url = stack.enter_context(ScriptedServer()).url
        if is_routed:
            url = routed(stack, [url])
        client = stack.enter_context(sending(url, 1000, sent=b"{"))
        client.setblocking(False)
        began = time.monotonic()

        def is_answered() -> bool:
            try:
                return bool(client.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                assert time.monotonic() < began + 60
                return False

        drip(client, is_answered)
        client.settimeout(60)
        head, error = answer_of(client)
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "not complete, after 0.5 s" in error["message"]


def test_a_length_above_the_limit_is_refused_before_the_body(server: ScriptedServer) -> None:
    with sending(server.url, 2**24 + 1) as client:
        head, error = answer_of(client)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert error["code"] == "body_too_large"


@pytest.mark.needs("minisgl_gateway")
@pytest.mark.parametrize("is_routed", [False, True])
def test_unfinished_bodies_have_a_budget(
    is_routed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One key takes half of it at most. Short bodies and other keys go on."""
    monkeypatch.setattr(module, "ROOM_S", 0.3)
    monkeypatch.setattr(module, "MOST_BYTES", 1000 * KIB)
    keys = key_ring(key_file(tmp_path, FILE.replace("= 3", "= 100")))
    with ExitStack() as stack:
        url = stack.enter_context(ScriptedServer(keys=keys)).url
        if is_routed:
            url = routed(stack, [url], key=OTHER)
        first = f"authorization: Bearer {SECRET}"
        stack.enter_context(sending(url, 400 * KIB, first, sent=b"{"))
        time.sleep(0.2)  # it is read; a body that came later would be refused as well
        with sending(url, 400 * KIB, first) as client:
            head, error = answer_of(client)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in head.lower()
        assert error["code"] == "too_many_bodies"
        chunked = iter([b" " * 400 * KIB, b"{"])  # no length is declared
        headers = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"}
        with httpx.Client(timeout=60) as http:
            refused = http.post(f"{url}{TEXT}", content=chunked, headers=headers)
            assert refused.status_code == 503
            short = http.post(f"{url}{TEXT}", json={"prompt": "a"}, headers=headers)
            assert short.status_code == 200
            long = b'{"prompt": "a"%b}' % (b" " * 300 * KIB)
            headers["authorization"] = f"Bearer {OTHER}"
            assert http.post(f"{url}{TEXT}", content=long, headers=headers).status_code == 200


@pytest.mark.needs("minisgl_gateway")
@pytest.mark.parametrize("is_routed", [False, True])
def test_keys_and_limits_are_checked_before_the_body(is_routed: bool, tmp_path: Path) -> None:
    keys = key_ring(key_file(tmp_path, FILE))
    with ExitStack() as stack:
        server = stack.enter_context(ScriptedServer(keys=keys))
        url = server.url
        if is_routed:
            url = routed(stack, [url], key=OTHER)
        for key in ("", "authorization: Bearer unknown"):
            with sending(url, 2**24, *filter(None, [key])) as client:
                head, error = answer_of(client)
            assert head.startswith(b"HTTP/1.1 401 ")
            assert b"\r\nwww-authenticate: bearer\r\n" in head.lower()
            assert error["code"] == "invalid_api_key"
        headers = {"authorization": f"Bearer {SECRET}"}
        for _ in range(3):
            body = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}
            answer = httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200
        deadline = time.monotonic() + 60
        while True:  # the router learns the limits from the replica's next state
            with sending(url, 2**20, f"authorization: Bearer {SECRET}") as client:
                client.settimeout(1)
                try:
                    head, error = answer_of(client)
                    break
                except TimeoutError:
                    assert time.monotonic() < deadline
        assert head.startswith(b"HTTP/1.1 429 ")
        assert error["code"] == "rate_limit_exceeded"
