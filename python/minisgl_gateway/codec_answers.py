"""Answers requests that only encode or decode a text, without the model.

Such a text may be longer than the context, so that a client can see by how much. But encoding takes
time and memory, and its answer is an array, so its tokens have a bound, too.
"""

from __future__ import annotations

from typing import Final

import msgspec

from minisgl.core import Failed
from minisgl.errors import PromptTooLong
from minisgl.message import ChatPrompt, TextPrompt, ids_from_bytes
from minisgl.message.frontend import CodecMsg, CodecReply, EncodeMsg
from minisgl.tokenizer.tokenize import PromptEncoder

MIN_TOKENS: Final = 64 * 1024
"""The least bound, for models with a short context: 0.1 s."""


def answer_codec(encoder: PromptEncoder, message: CodecMsg) -> CodecReply:
    """Encode or decode. If that raises, the reply has the exception as `failed`."""
    tokenizer = encoder.tokenizer
    try:
        stream = tokenizer.stream(skip_special_tokens=False)
        if not isinstance(message, EncodeMsg):
            ids = ids_from_bytes(message.ids).tolist()
            text = "".join(map(stream.feed, ids)) + stream.flush()
            return CodecReply(seq=message.seq, text=text)
        data = _encoded(encoder, message)
        tokens = ids_from_bytes(data).tolist() if message.with_pieces else ()
        pieces = [stream.data(token) for token in tokens]
        return CodecReply(seq=message.seq, ids=bytes(data), pieces=pieces)
    except Exception as error:
        return CodecReply(seq=message.seq, failed=Failed.of(message.seq, error))


def _encoded(encoder: PromptEncoder, message: EncodeMsg) -> bytes:
    prompt, context_length = message.prompt, message.context_length
    param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
    if message.is_plain and isinstance(prompt, TextPrompt):
        if not prompt.text:
            return b""
        prompt = msgspec.structs.replace(prompt, add_special_tokens=False)
    half = None if context_length is None else most_tokens(context_length) // 2
    try:
        encoded = encoder.encode(prompt, half)
        data = encoded.ids
        if message.for_cache and encoded.images and encoder.images:
            data = encoder.images.keyed(data, encoded.images)
    except PromptTooLong as error:  # its beginning alone
        check_count(error.got, context_length, param, "at least ")
        raise
    check_count(len(data) // 4, context_length, param)
    return data


def most_tokens(context_length: int) -> int:
    """Return the most tokens of a text that is only encoded or decoded."""
    return max(2 * context_length, MIN_TOKENS)


def check_count(
    num_tokens: int, context_length: int | None, param: str, at_least: str = ""
) -> None:
    """Raise PromptTooLong above `most_tokens`. context_length: None if there is no bound."""
    most = num_tokens if context_length is None else most_tokens(context_length)
    if num_tokens > most:
        raise PromptTooLong(
            f"the text has {at_least}{num_tokens:,} tokens, and without the model at most {most:,} "
            "are encoded or decoded in one request; send it in parts",
            limit=most,
            got=num_tokens,
            param=param,
        )
