"""Answers requests that only encode or decode a text, without the model."""

from __future__ import annotations

from minisgl.core import Failed
from minisgl.message import TextPrompt, ids_from_bytes, ids_to_bytes
from minisgl.message.frontend import CodecMsg, CodecReply, EncodeMsg
from minisgl.tokenizer.tokenize import PromptEncoder


def answer_codec(encoder: PromptEncoder, message: CodecMsg) -> CodecReply:
    """Encode or decode. If that raises, the reply has the exception as `failed`."""
    tokenizer = encoder.tokenizer
    try:
        stream = tokenizer.stream(skip_special_tokens=False)
        if not isinstance(message, EncodeMsg):
            ids = ids_from_bytes(message.ids).tolist()
            text = "".join(map(stream.feed, ids)) + stream.flush()
            return CodecReply(seq=message.seq, text=text)
        if message.is_plain and isinstance(message.prompt, TextPrompt):
            data = ids_to_bytes(tokenizer.encode(message.prompt.text, add_special_tokens=False))
        else:
            data = encoder.encode(message.prompt)
        tokens = ids_from_bytes(data).tolist() if message.with_pieces else ()
        pieces = [stream.data(token) for token in tokens]
        return CodecReply(seq=message.seq, ids=bytes(data), pieces=pieces)
    except Exception as error:
        return CodecReply(seq=message.seq, failed=Failed.of(message.seq, error))
