"""JSON bodies of requests and responses, read into records and written from them."""

from __future__ import annotations

import asyncio
import codecs
import gc
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import msgspec
import numpy as np
from fastapi import Request, Response
from starlette.types import Scope

from minisgl.errors import InvalidRequest
from minisgl.server.errors import refusal
from minisgl.server.strict import Json, field_error
from minisgl.server.web.connections import client_address
from minisgl.utils.text import brief

MAX_BODY_BYTES: Final = 16 * 2**20  # a million tokens are about 5 MB of English
MAX_VALUES: Final = 2**20
"""Of a body, as `_num_values` counts them: more than the token ids of any context, and than a
conversation of 40,000 calls and results. While they are made nobody else is served."""
MAX_PAUSE_S = 30.0
"""The longest wait for the next piece of a body. A slower client may only want to hold a connection
open."""

WHOLE_S = 60.0
"""The longest time of a whole body: one of the largest size comes within it at 2.3 Mbit/s."""

R = TypeVar("R", bound=Json)


async def read(request: Request, kind: type[R], *, may_lack_type: bool = False) -> R:
    """Return the body as a `kind`, each field of which is honoured or neutral.

    may_lack_type: accept a request without Content-Type, or with that of bytes, as some of Ollama's
    clients send it. No other is accepted: a page of another site may send text or a form without a
    question.
    Raises InvalidRequest.
    """
    content_type = request.headers.get("content-type", "")
    is_json = content_type.partition(";")[0].strip().lower() == "application/json"
    if not is_json and not (may_lack_type and content_type in ("", "application/octet-stream")):
        got = brief(content_type) if content_type else "none"
        raise refusal(
            f"the content type must be application/json, got {got}: add the header "
            "'Content-Type: application/json'",
            status=415,
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise refusal(
            f"bodies must have no content encoding, got {brief(encoding)}: send the JSON "
            "uncompressed, without the header Content-Encoding",
            status=415,
            code="unsupported_media_type",
        )
    body = await read_bytes(request, request.app.state.bodies, owner_of(request.scope))
    return parse(body, kind).checked()


def response(record: object, status: int = 200) -> Response:
    """Return a response whose body is `record` as JSON."""
    return json(msgspec.json.encode(record), status)


def json(data: bytes, status: int = 200) -> Response:
    return Response(data, status, media_type="application/json")


async def read_bytes(request: Request, bodies: Bodies, owner: str) -> bytes:
    """Return the body. bodies: where its memory is taken. owner: who takes it.

    Raises InvalidRequest if it is too long, if it or its next piece is late, or if there is no
    memory for it.
    """
    declared = request.headers.get("content-length", "")
    num_declared = int(declared) if declared.isdecimal() else 0
    with bodies.reading(owner) as need:
        _check_length(num_declared)
        await need(num_declared)
        body, stream, loop = bytearray(), aiter(request.stream()), asyncio.get_running_loop()
        end = loop.time() + WHOLE_S
        while True:
            try:
                async with asyncio.timeout_at(min(loop.time() + MAX_PAUSE_S, end)):
                    chunk = await anext(stream, None)
            except TimeoutError:
                what = (
                    f"after {WHOLE_S:g} s"
                    if loop.time() >= end
                    else f"and no part of it came for {MAX_PAUSE_S:g} s"
                )
                raise refusal(
                    f"the body is not complete, {what}: is the Content-Length right?",
                    status=408,
                    code="body_timeout",
                ) from None
            if chunk is None:
                return bytes(body)
            _check_length(len(body) + len(chunk))
            await need(len(body) + len(chunk))
            body += chunk


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise refusal(f"the body exceeds {MAX_BODY_BYTES} bytes", status=413, code="body_too_large")


def owner_of(scope: Scope) -> str:
    """Return who takes the memory of a request's body: its key, else the client's address."""
    if key := scope.get("api_key"):
        return f"key {key.name}"
    return client_address((scope.get("client") or ("",))[0])


_MARKS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LONE: Final = " (half of a surrogate pair is escaped alone, such as \\ud800)"


def parse(body: bytes, kind: type[R]) -> R:
    """Decode strictly. Raises InvalidRequest, which names the wrong field if one is wrong."""
    if not body:
        raise InvalidRequest("the body is empty; send a JSON object")
    if _num_values(body) > MAX_VALUES and _num_values(_without_texts(body)) > MAX_VALUES:
        raise refusal(
            f"the body has more than {MAX_VALUES:,} values (an object counts as 8); send fewer "
            "token ids or messages, or several requests",
            status=413,
            code="body_too_large",
        )
    try:
        gc.disable()  # what is decoded is no garbage; looking for some would take most of the time
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # msgspec 0.23: always the former
        reason = str(error).removeprefix("JSON is malformed: ")
        if "utf-8" in reason.lower():
            what = f"UTF-8: byte 0x{_not_utf8(body):02x} in a string"
        else:
            what = f"JSON: {reason}{_hint(body, reason)}"
        raise InvalidRequest(f"the body is not valid {what}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    finally:
        gc.enable()


def _num_values(text: bytes) -> int:
    """Return the number of commas and opening brackets. A brace counts as 8: a message takes a
    server as much time as so many token ids."""
    return text.count(b",") + text.count(b"[") + 8 * text.count(b"{")


def _without_texts(body: bytes) -> bytes:
    """Return the body without what stands in its texts."""
    bare = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_text = np.logical_xor.accumulate(bare == ord('"'))
    return bare[~is_text].tobytes()


def _not_utf8(body: bytes) -> int:
    """Return the first byte that is not UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return body[error.start]
    raise AssertionError("msgspec refuses text that Python takes")


def _hint(body: bytes, reason: str) -> str:
    """Return what probably caused msgspec's error, in parentheses, or ""."""
    if body.startswith(_MARKS):
        return " (send UTF-8 without a byte order mark)"
    if body.isspace():
        return " (it has only spaces)"
    if "surrogate" in reason or ("truncated" in reason and b"\\ud" in body.lower()):
        return _LONE
    found = re.search(r"invalid character \(byte (\d+)\)", reason)
    if found and body.startswith((b"NaN", b"Infinity"), int(found[1])):
        return " (NaN and Infinity are not JSON)"
    return ""


# --- the memory of bodies that have not come whole: a budget for all, a share for each client -----

MOST_BYTES: Final = 256 * 2**20
"""The budget: 16 bodies of the largest size."""

FREE_BYTES: Final = 64 * 2**10
"""The first bytes of each body, which do not count: uvicorn holds as many for each connection, and
most requests have fewer, so they never wait for room."""

ROOM_S = 5.0
"""The longest wait for room. A body of the largest size comes within it at 27 Mbit/s."""


class Bodies:
    """The bytes of unfinished bodies by owner, which is a key or an address. Mutable.

    An owner may take at most what it leaves free: one alone half of the budget, and of k greedy
    owners each 1 / (k + 1). So none can take all, and another one always finds room.
    """

    def __init__(self) -> None:
        self.most = MOST_BYTES
        self._taken: Counter[str] = Counter()
        self._given_back = asyncio.Event()

    @contextmanager
    def reading(self, owner: str) -> Iterator[Callable[[int], Awaitable[None]]]:
        """Yield what waits until there is room for so many bytes of a body, which ends when the
        block does. It raises InvalidRequest (503) if there is none in time."""
        num_taken = 0

        async def need(num_bytes: int) -> None:
            nonlocal num_taken
            if (more := num_bytes - FREE_BYTES - num_taken) > 0:
                await self.take(owner, more)
                num_taken += more

        try:
            yield need
        finally:
            if num_taken:
                self.give_back(owner, num_taken)

    async def take(self, owner: str, num_bytes: int) -> None:
        """Wait for room, and take it. Raises InvalidRequest (503) if there is none in time."""
        try:
            async with asyncio.timeout(ROOM_S):
                while not self._fits(owner, num_bytes):
                    await self._given_back.wait()
        except TimeoutError:
            raise refusal(
                f"unfinished bodies take the memory that is meant for them ({self.most} bytes; one "
                "key or address gets at most what it leaves to others): send fewer large bodies at "
                "a time, and try again later",
                status=503,
                code="too_many_bodies",
            ) from None
        self._taken[owner] += num_bytes

    def _fits(self, owner: str, num_bytes: int) -> bool:
        left = self.most - self._taken.total() - num_bytes
        return self._taken[owner] + num_bytes <= left

    def give_back(self, owner: str, num_bytes: int) -> None:
        self._taken[owner] -= num_bytes
        if not self._taken[owner]:
            del self._taken[owner]
        self._given_back.set()  # wakes all that wait
        self._given_back.clear()
