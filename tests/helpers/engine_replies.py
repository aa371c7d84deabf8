"""Replies of an engine that does not run, and what a call's reader gets of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.core import Accepted, Finished
from minisgl.errors import EngineError
from minisgl.message import TextReply, TokenizeMsg, ids_to_bytes
from minisgl.server.call import Call


class Queue:
    """Stands for both ends of a queue. Mutable."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def put(self, records: Sequence[msgspec.Struct]) -> None:
        self.sent += records


def accepted(uid: int, message: TokenizeMsg, most: int = 50) -> Accepted:
    sampling = msgspec.structs.replace(message.sampling, max_tokens=most)
    ids = ids_to_bytes([4, 5, 6]) if message.returns_ids else b""
    return Accepted(uid=uid, num_prompt_tokens=3, sampling=sampling, prompt_ids=ids)


def text(uid: int, text: str, *ids: int, **fields: Any) -> TextReply:
    return TextReply(uid=uid, text=text, token_ids=list(ids), **fields)


def ending(uid: int, num: int) -> Finished:
    return Finished(
        uid=uid, reason="length", num_prompt_tokens=3, num_output_tokens=num, queued_s=1, decode_s=1
    )


def read(call: Call) -> tuple[str, list[Finished], str]:
    """Return the text, the ends and the error that the reader gets of what has come."""

    async def collect() -> tuple[str, list[Finished], str]:
        written, ends, error = "", list[Finished](), ""
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(0.05):
                    async for batch in call:
                        written += "".join(r.text for _, r in batch if isinstance(r, TextReply))
                        ends += [reply for _, reply in batch if isinstance(reply, Finished)]
            except EngineError as raised:
                error = type(raised).__name__
        return written, ends, error

    return asyncio.run(collect())
