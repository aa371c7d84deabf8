"""The text of one request, token by token: the same text as decoding all of its ids at once.

A stream holds back only the text that a later token can change. The decoder in tokenizer.json says
which text that is:

- ByteLevel (Qwen, Llama 3): a token is always the same bytes, so an incremental UTF-8 decoder over
  a table from id to bytes is exact. It is here.
- Metaspace, sentencepiece (Llama 2, Mistral, Gemma): a token is always the same piece of text. See
  `minisgl.tokenizer.pieces`.
- Any other decoder: the `tokenizers` library's own stream. See `minisgl.tokenizer.library_stream`.

Why not the library's stream for all: it decodes a window of ids twice per token and compares. With
the built-in model's tokenizer it takes 1.5 us a token, and this module 0.3 us. Its window grows
without bound while a model repeats an invalid byte.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any, Protocol

import tokenizers


class TextStream(Protocol):
    """The text of one request. `feed` returns the text that is final with this token, `flush` the
    rest.

    `data` returns the UTF-8 bytes of a token in the middle of a text; they may be a part of a
    character. It does not change the stream.
    """

    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def data(self, token_id: int) -> bytes: ...


class PieceTable(dict[int, Any]):
    """Token id -> piece. An entry is made when its id is first looked up: a vocabulary has 150,000
    ids, and a server meets few of them."""

    def __init__(self, backend: tokenizers.Tokenizer, piece: Callable[[str], Any]) -> None:
        self._backend = backend
        self._piece = piece

    def __missing__(self, token_id: int) -> Any:
        token = self._backend.id_to_token(token_id)
        # A model may pad its last layer: ids beyond the vocabulary have no text.
        piece = None if token is None else self._piece(token)
        self[token_id] = piece
        return piece


class _ByteStream:
    """Byte-level BPE: a token is bytes, and may end within a character. Invalid UTF-8 becomes
    U+FFFD."""

    def __init__(self, table: PieceTable, skip_ids: frozenset[int]) -> None:
        self._table = table
        self._skip_ids = skip_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece is None or token_id in self._skip_ids:
            return ""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def data(self, token_id: int) -> bytes:
        return self._table[token_id] or b""


def stream_factory(
    backend: tokenizers.Tokenizer,
) -> Callable[[frozenset[int]], TextStream]:
    """Return a function that makes a `TextStream`; its argument is the ids that the stream
    skips."""
    # Pickle has the decoder's part of tokenizer.json. Writing all of that file would take 0.2 s.
    decoder = backend.decoder and json.loads(backend.decoder.__getstate__())
    stages = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    make: Callable[[frozenset[int]], TextStream] | None
    if [stage and stage["type"] for stage in stages] == ["ByteLevel"]:
        byte_of = _byte_level_alphabet()
        table = PieceTable(backend, lambda token: _byte_level_piece(token, byte_of))

        def make(skip_ids: frozenset[int]) -> TextStream:
            return _ByteStream(table, skip_ids)
    else:
        from minisgl.tokenizer.pieces import piece_streams

        make = piece_streams(backend, stages)
        if make is None:
            from minisgl.tokenizer.library_stream import library_streams

            make = library_streams(backend)
    return make


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each of GPT-2's characters: printable Latin-1 stands for itself, and the
    characters from 256 on for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_piece(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:  # an added token is written as it is
        return token.encode()
