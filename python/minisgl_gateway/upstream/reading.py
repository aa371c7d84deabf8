"""Reads an upstream's answers within bounds of size, line and silence.

A broken upstream must neither fill the gateway's memory nor hold a request for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Final, TypeVar

from fastapi import Request

from minisgl_gateway.leaving import while_connected
from minisgl_gateway.router.upstream import Answer, ReplicaFailed
from minisgl_gateway.upstream.wire import UpstreamFailed

T = TypeVar("T")

MAX_WHOLE: Final = 64 * 2**20
"""The most bytes of an answer that is no stream: 100,000 tokens with 5 alternatives each take 40
MB, and without log-probabilities half a megabyte."""

MAX_STREAM: Final = 256 * 2**20
"""The most bytes of a stream. A chunk has some 250 bytes, so this is a million tokens."""

MAX_LINE: Final = 4 * 2**20
"""The most bytes of a line of a stream, which has one chunk."""

SILENT_S: Final = 600.0
"""The default of --upstream-timeout: OpenAI's clients wait as long."""


async def in_time(work: Awaitable[T], silent_s: float) -> T:
    """Return what `work` returns. Raises UpstreamFailed if it takes longer than `silent_s`."""
    try:
        async with asyncio.timeout(silent_s):
            return await work
    except TimeoutError:
        raise UpstreamFailed(
            f"the upstream sent nothing for {silent_s:g} s; ask for a stream, or raise the "
            "gateway's --upstream-timeout"
        ) from None


async def whole(answer: Answer, request: Request, silent_s: float) -> bytes:
    """Return the body, and close the answer. Raises UpstreamFailed and ClientDisconnect."""

    async def joined() -> bytes:
        return b"".join([piece async for piece in _pieces(answer, MAX_WHOLE, silent_s)])

    try:
        return await while_connected(joined(), request.receive)
    finally:
        answer.close()


async def events(answer: Answer, silent_s: float) -> AsyncIterator[list[bytes]]:
    """Yield the data of the events that have come together. Raises UpstreamFailed."""
    rest = b""
    async for piece in _pieces(answer, MAX_STREAM, silent_s):
        *lines, rest = (rest + piece).split(b"\n")
        if max(map(len, (*lines, rest))) > MAX_LINE:
            raise UpstreamFailed(f"a line of the upstream's stream exceeds {_mib(MAX_LINE)}")
        yield _data(lines)
    yield _data([rest])


async def _pieces(answer: Answer, most: int, silent_s: float) -> AsyncIterator[bytes]:
    """Yield what has come. Raises UpstreamFailed after `most` bytes or `silent_s` of silence."""
    num_bytes, pieces = 0, aiter(answer)
    try:
        while piece := await in_time(anext(pieces, b""), silent_s):
            num_bytes += len(piece)
            if num_bytes > most:
                raise UpstreamFailed(f"the upstream's answer exceeds {_mib(most)}")
            yield piece
    except ReplicaFailed as error:
        raise UpstreamFailed(f"the upstream failed within its answer ({error})") from None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB"


def _data(lines: Sequence[bytes]) -> list[bytes]:
    found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    return [data for data in found if data != b"[DONE]"]
