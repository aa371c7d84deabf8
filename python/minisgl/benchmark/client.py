"""A streaming client of OpenAI-compatible servers that measures a request.

The time of an arrival is when the read of its bytes returns, before they are parsed.

Why aiohttp: the client mostly shares the machine with the server that it measures, and httpx takes
several times the CPU time for a token. A bare reader on asyncio's streams takes little less than
aiohttp, which is not worth an HTTP parser of our own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from minisgl.benchmark.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server, and the form of requests. text: prompts are texts instead of token ids; prompts
    of `chat` always are. extra: more fields of each request's body."""

    url: str
    model: str | None = None
    api: Literal["completions", "chat", "generate"] = "completions"
    text: bool = False
    ignore_eos: bool = True
    api_key: str | None = None
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
        return self.url.rstrip("/") + path.get(self.api, "/generate")


# --- the events of a stream (other fields are skipped) -----------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    """Times that Mini-SGLang measures: in the queue, and from the first launch to the first token.

    The `timings` of other servers have other fields.
    """

    queued_s: float | None = None
    prefill_s: float | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(_Choice):
    """`/generate` of Mini-SGLang has a choice's fields at the top."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class SseReader:
    """Splits bytes into the data of whole server-sent events (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        if b"\r" in data:
            held = data.endswith(b"\r")  # its "\n" may be on the way
            data = data.replace(b"\r\n", b"\n")
            data = data[:-1].replace(b"\r", b"\n") + b"\r" if held else data.replace(b"\r", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return [found for event in events if (found := _data_of(event)) is not None]


def _data_of(event: bytes) -> bytes | None:
    """Return the `data` lines of an event; None if there are none (a comment, a keep-alive)."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None


class Answer:
    """Fills a stream's record, and keeps its text and ids for the next turn. Mutable."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.done = False

    def take(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        chunk = _decode(data)
        record = self.record
        if chunk.error is not None:
            record.error = f"in the stream: {chunk.error}"
        if chunk.usage is not None:
            record.num_prompt = chunk.usage.prompt_tokens
            record.num_output = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                record.num_cached = chunk.usage.prompt_tokens_details.cached_tokens
        timings = chunk.timings
        if timings and timings.queued_s is not None and timings.prefill_s is not None:
            record.server_ttft_s = timings.queued_s + timings.prefill_s
        for choice in (chunk,) if chunk.choices is None else chunk.choices:
            text = choice.text or ""
            if choice.delta is not None:
                text = choice.delta.content or choice.delta.reasoning_content or ""
            ids = choice.token_ids or []
            if text or ids:
                record.chunks.append((at, len(ids)))
                self.texts.append(text)
                self.token_ids += ids
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
                if not text and not ids:
                    record.finish_at = at


async def measure(
    http: aiohttp.ClientSession, target: Target, body: bytes, record: Record, zero: float
) -> Answer:
    """Send a request, and fill its record. zero: the start of the run on `time.perf_counter`.

    Returns the answer; a failure is the record's `error`.
    """
    answer = Answer(record)
    headers = {
        "Content-Type": "application/json",
        "X-Request-Id": f"bench-{record.session}-{record.turn}",
    }
    record.sent = time.perf_counter() - zero
    try:
        async with http.post(target.endpoint, data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                record.error = f"HTTP {response.status}: {text}"
            else:
                reader = SseReader()
                async for data in response.content.iter_any():
                    at = time.perf_counter() - zero
                    for event in reader.feed(data):
                        answer.take(event, at)
                if not answer.done and record.finish_reason is None and not record.error:
                    record.error = "the stream ended without [DONE] or a finish_reason"
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended = time.perf_counter() - zero
    return answer
