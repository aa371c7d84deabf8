"""Text to token ids and back, by the server's tokenizers, without the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from minisgl.errors import EngineError, ServerBusy
from minisgl.message import Prompt
from minisgl.message.frontend import CodecReply, DecodeMsg, EncodeMsg
from minisgl.server.clients import Key
from minisgl.server.errors import encodable
from minisgl.server.frontend import Frontend

CODEC_TIMEOUT_S: Final = 60.0
"""A prompt waits until the tokenizer has encoded its key's prompts before it."""

MAX_OPEN_BYTES: Final = 32 * 2**20
"""The most bytes of texts that one key may let wait here, two of the largest bodies. Prompts of the
model have other bounds."""

SMALL: Final = 64 * 1024
"""Messages of at most so many bytes are not refused for `MAX_OPEN_BYTES`."""


def key_number(scope: Mapping[str, Any]) -> int:
    """Return the number of the key of an HTTP request; 0 without keys."""
    key: Key | None = scope.get("api_key")
    return key.number if key else 0


async def encode(
    frontend: Frontend,
    prompt: Prompt,
    key: int,
    *,
    is_plain: bool = False,
    for_cache: bool = False,
    with_pieces: bool = False,
) -> CodecReply:
    """Return the ids of `prompt`. Raises RequestError, EngineError.

    key, is_plain, for_cache, with_pieces: see `EncodeMsg`.
    """
    message = EncodeMsg(
        seq=frontend.round_trips.new_seq(),
        prompt=prompt,
        is_plain=is_plain,
        for_cache=for_cache,
        with_pieces=with_pieces,
        key=key,
        context_length=frontend.context_length,
    )
    with encodable():
        num_bytes = len(msgspec.msgpack.encode(prompt))
    return await _codec(frontend, message, num_bytes)


async def decode(frontend: Frontend, ids: bytes, key: int) -> str:
    """Return the text of token ids (little-endian int32), whose number the caller has checked.
    Raises RequestError, EngineError.

    key: see `DecodeMsg`.
    """
    message = DecodeMsg(seq=frontend.round_trips.new_seq(), ids=ids, key=key)
    return (await _codec(frontend, message, len(ids))).text


async def _codec(frontend: Frontend, message: EncodeMsg | DecodeMsg, num_bytes: int) -> CodecReply:
    trips = frontend.round_trips
    with _counted(trips.open_bytes, message.key, num_bytes):
        answers = await trips.ask(message, 1, CODEC_TIMEOUT_S)
    if not answers or not isinstance(answers[0], CodecReply):
        raise EngineError(f"no answer from the tokenizer within {CODEC_TIMEOUT_S:g} s")
    if failed := answers[0].failed:
        raise failed.to_error()
    return answers[0]


@contextlib.contextmanager
def _counted(open_bytes: dict[int, int], key: int, num_bytes: int) -> Iterator[None]:
    """Count the bytes of a key's open messages. Raises ServerBusy if they are too many."""
    if num_bytes > SMALL and open_bytes[key] + num_bytes > MAX_OPEN_BYTES:
        raise ServerBusy(
            f"{open_bytes[key] / 2**20:.0f} MiB of your texts wait to be encoded or decoded, and "
            f"at most {MAX_OPEN_BYTES >> 20} MiB may wait; try again later"
        )
    open_bytes[key] += num_bytes
    try:
        yield
    finally:
        open_bytes[key] -= num_bytes
