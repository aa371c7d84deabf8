"""A stub of an OpenAI-compatible server with known delays, to check the client against.

Every stream follows a `Script`. The stub keeps the times at which it gave each chunk to the socket,
by request id, so that a client's numbers can be compared with them. It answers /v1/completions,
/v1/chat/completions and /generate, streams only. It uses plain asyncio protocols because it must be
faster than the client: with a framework, a measurement of the client would measure the framework.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

MODEL = "stub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The delays of every stream. A chunk of `tokens_per_chunk` tokens leaves every `itl_s`.

    stall_every: every nth gap lasts stall_s instead (0: none). token_ids: whether chunks carry ids.
    usage: whether the last chunk has the number of tokens. fail_every: every nth request is
    answered with HTTP 500 (0: none).
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_chunk: int = 1
    stall_every: int = 0
    stall_s: float = 0.0
    token_ids: bool = False
    usage: bool = True
    fail_every: int = 0

    def gaps(self, num_tokens: int) -> list[float]:
        """Return the seconds before each chunk, the first from the request's arrival."""
        num_chunks = -(-num_tokens // self.tokens_per_chunk)
        stalls = self.stall_every
        return [self.ttft_s] + [
            self.stall_s if stalls and index % stalls == 0 else self.itl_s
            for index in range(1, num_chunks)
        ]


@dataclass(slots=True, kw_only=True)
class Sent:
    """The real times of one stream, in seconds of `time.perf_counter`. Mutable: it grows."""

    arrived: float
    chunks: list[float]


class StubServer:
    """`async with StubServer(script) as stub:` listens on `stub.url`; `stub.sent` has the real
    times."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.sent: dict[str, Sent] = {}
        self.num_requests = 0
        self.num_connections = 0
        self.bodies: list[dict[str, Any]] = []

    async def __aenter__(self) -> StubServer:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", 0, backlog=2048
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()


class _Connection(asyncio.Protocol):
    def __init__(self, server: StubServer) -> None:
        self._stub = server
        self._buffer = b""
        self._paused = False
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._stub.num_connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].decode("latin-1")
            length = re.search(r"(?i)\r\ncontent-length: *(\d+)", head)
            body_end = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < body_end:
                return
            body = self._buffer[end + 4 : body_end]
            self._buffer = self._buffer[body_end:]
            self._request(head, body)

    def _request(self, head: str, body: bytes) -> None:
        now = time.perf_counter()
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            return self._answer(200 if path == "/v1/models" else 404, models)
        stub = self._stub
        stub.num_requests += 1
        if stub.script.fail_every and stub.num_requests % stub.script.fail_every == 0:
            return self._answer(500, {"error": {"message": "scripted failure"}})
        asked = json.loads(body)
        request_id = re.search(r"(?i)\r\nx-request-id: *(\S+)", head)
        sent = Sent(arrived=now, chunks=[])
        stub.bodies.append(asked)
        stub.sent[request_id[1] if request_id else str(stub.num_requests)] = sent
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        num_tokens = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
        chunks = _chunks(path, stub.script, num_tokens, len(str(asked)) // 8)
        self._stream(iter(stub.script.gaps(num_tokens)), chunks, sent, now)
        return None

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def _stream(
        self, gaps: Iterator[float], chunks: Iterator[bytes], sent: Sent, due: float
    ) -> None:
        """Write the chunks that are due, then sleep until the next; with delays of 0, one chunk a
        turn."""
        loop = asyncio.get_running_loop()
        gap = next(gaps, None)
        if gap is None:
            self._write(b"".join(chunks) + b"data: [DONE]\n\n", last=True)
            return
        # Counted from the time when it was due, so that delays do not add up.
        due += gap

        def write() -> None:
            if self._gone:
                return
            if self._paused:
                loop.call_later(0.0005, write)
                return
            self._write(next(chunks))
            sent.chunks.append(time.perf_counter())
            self._stream(gaps, chunks, sent, due)

        if gap == 0:
            loop.call_soon(write)
        else:
            loop.call_later(max(due - time.perf_counter(), 0), write)

    def _write(self, data: bytes, *, last: bool = False) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) + b"0\r\n\r\n" * last)


def _chunks(path: str, script: Script, num_tokens: int, num_prompt: int) -> Iterator[bytes]:
    """Yield the events of a stream in the form of the API that `path` names, the end last."""
    size = script.tokens_per_chunk
    for start in range(0, num_tokens, size):
        yield _event(path, min(size, num_tokens - start), token_ids=script.token_ids)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    end: dict[str, Any] = {"choices": [{"index": 0, "text": "", "delta": {}}]}
    end["choices"][0]["finish_reason"] = "length"
    if path == "/generate":
        end = {"text": "", "token_ids": [], "finish_reason": "length"}
    yield b"data: " + json.dumps(end).encode() + b"\n\n"
    if script.usage:
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


@cache
def _event(path: str, num_tokens: int, *, token_ids: bool) -> bytes:
    text = " tok" * num_tokens
    ids = [7] * num_tokens
    if path == "/generate":
        body: dict[str, Any] = {"text": text, "token_ids": ids if token_ids else []}
    else:
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
        if "chat" in path:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        body = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion"}
        if token_ids:
            choice["token_ids"] = ids
        body |= {"created": 1_700_000_000, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"
