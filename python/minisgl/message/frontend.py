"""The unions of the API server's messages, with the records of requests that run no model.

They are apart from `minisgl.message` because an `LLM` does not use them.
"""

from __future__ import annotations

import msgspec

from minisgl.core.event import Failed, Record
from minisgl.message import (
    AbortMsg,
    Control,
    Natural,
    PingMsg,
    Prompt,
    Report,
    RequestReply,
    TokenizeMsg,
)


class PongMsg(Record, frozen=True, kw_only=True):
    """A rank's answer to the `PingMsg` of the same seq."""

    seq: int


class EncodeMsg(Record, frozen=True, kw_only=True):
    """Encode a prompt. The tokenizer answers with a `CodecReply` of the same seq, with `ids`.

    is_plain: add no special tokens to a text. for_cache: images have their ids in the prefix cache.
    with_pieces: ask for `pieces` too. key: the number of the API key; 0 without keys.
    context_length: as in `TokenizeMsg`; it bounds the ids.
    """

    seq: int
    prompt: Prompt
    is_plain: bool = False
    for_cache: bool = False
    with_pieces: bool = False
    key: Natural = 0
    context_length: int | None = None


class DecodeMsg(Record, frozen=True, kw_only=True):
    """Decode token ids (little-endian int32), special tokens included.

    The tokenizer answers with a `CodecReply` of the same seq, with `text`. key: as in `EncodeMsg`.
    """

    seq: int
    ids: bytes
    key: Natural = 0


class CodecReply(Record, frozen=True, kw_only=True):
    """The answer to an `EncodeMsg` or a `DecodeMsg`.

    pieces: the UTF-8 bytes of each of `ids`. failed: the refusal of the message.
    """

    seq: int
    ids: bytes = b""
    pieces: list[bytes] = msgspec.field(default_factory=list)
    text: str = ""
    failed: Failed | None = None


CodecMsg = EncodeMsg | DecodeMsg
FrontendMsg = TokenizeMsg | AbortMsg | PingMsg | Control | CodecMsg
"""To a tokenizer."""

UserReply = RequestReply | PongMsg | Report | CodecReply
"""To the API server."""
