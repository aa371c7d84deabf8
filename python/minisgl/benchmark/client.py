"""A streaming client of OpenAI-compatible servers that measures; `shards` runs many of them.

The time of an arrival is when the read of its bytes returns, before they are parsed.

Why aiohttp: the client mostly shares the machine with the server that it measures, and httpx takes
several times the CPU time for a token. A bare reader on asyncio's streams takes little less than
aiohttp, which is not worth an HTTP parser of our own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from minisgl.benchmark.record import Record, Session, Turn, as_text


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


class _Answer:
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


class Client:
    """One process's requests. on_progress(requests, tokens): called when a request ends."""

    def __init__(self, target: Target, start_at: float, on_progress: Callable[[int, int], None]):
        self._target = target
        self._start_at = start_at
        self._on_progress = on_progress
        self._records: list[Record] = []

    async def run(
        self, sessions: Sequence[tuple[int, Session]], concurrency: int | None
    ) -> list[Record]:
        """Run numbered sessions: `concurrency` at once, or at their times if it is None."""
        headers = (
            {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        )
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._target.timeout_s),
            headers=headers,
        ) as self._http:
            await asyncio.sleep(self._start_at - time.perf_counter())
            if concurrency is None:
                await self._at_their_times(sessions)
            else:
                todo = iter(sessions)
                await asyncio.gather(*(self._one_by_one(todo) for _ in range(concurrency)))
        return self._records

    async def _at_their_times(self, sessions: Sequence[tuple[int, Session]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, session in sorted(sessions, key=lambda item: item[1].at_s or 0.0):
                due = session.at_s or 0.0
                if (wait := self._start_at + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(self._session(number, session))

    async def _one_by_one(self, todo: Iterator[tuple[int, Session]]) -> None:
        for number, session in todo:
            await self._session(number, session)

    async def _session(self, number: int, session: Session) -> None:
        history: list[Any] = []
        for index, turn in enumerate(session.turns):
            if turn.think_s:
                await asyncio.sleep(turn.think_s)
            record = Record(session=number, turn=index, due=None if index else session.at_s)
            answer = _Answer(record)
            await self._request(answer, self._body(history, turn))
            self._records.append(record)
            self._on_progress(1, record.num_output or len(record.chunks))
            if record.error is not None:
                return
            history += self._answered(answer)

    async def _request(self, answer: _Answer, body: bytes) -> None:
        record, zero = answer.record, self._start_at
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": f"bench-{record.session}-{record.turn}",
        }
        record.sent = time.perf_counter() - zero
        try:
            async with self._http.post(
                self._target.endpoint, data=body, headers=headers
            ) as response:
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

    def _body(self, history: list[Any], turn: Turn) -> bytes:
        """Add the turn to the history of its session. Returns the request's body."""
        target = self._target
        if target.api == "chat":
            history.append({"role": "user", "content": as_text(turn.ids)})
            prompt: dict[str, Any] = {"messages": history}
        elif target.text:
            history.append(as_text(turn.ids))
            prompt = {"prompt" if target.api == "completions" else "text": " ".join(history)}
        else:
            history += turn.ids.tolist()
            prompt = {"prompt" if target.api == "completions" else "input_ids": history}
        body = {**prompt, "max_tokens": turn.max_tokens, "stream": True, "temperature": 0.0}
        if target.api != "generate":
            body["stream_options"] = {"include_usage": True}
            if target.model is not None:
                body["model"] = target.model
        if target.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **target.extra})

    def _answered(self, answer: _Answer) -> list[Any]:
        if self._target.api == "chat":
            return [{"role": "assistant", "content": "".join(answer.texts)}]
        return ["".join(answer.texts)] if self._target.text else answer.token_ids
