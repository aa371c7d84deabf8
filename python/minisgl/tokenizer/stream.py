"""The text of one request, token by token: the same text as decoding all of its ids at once.

A stream holds back only the text that a later token can change. The decoder in tokenizer.json says
which text that is:

- ByteLevel (Qwen, Llama 3): a token is always the same bytes, so an incremental UTF-8 decoder over
  a table from id to bytes is exact.
- Metaspace, sentencepiece (Llama 2, Mistral, Gemma): a token is always the same piece of text.
- Any other decoder: the row `stream` of the table `tokenizers`, which is the `tokenizers` library's
  own stream.

Why not the library's stream for all: it decodes a window of ids twice per token and compares, which
takes several times as long. Its window grows without bound while a model repeats an invalid byte.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

import tokenizers

from minisgl import plugins
from minisgl.errors import CheckpointError

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8


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


class _PieceStream:
    """Joins pieces of text and runs of single bytes.

    A piece is (its text at the start, its text elsewhere), or an int: one byte of a run. A run is
    text only if all of it is UTF-8, so it is held back until it ends. strip, num_strip: at most
    `num_strip` characters `strip` at the very start of the text are dropped.
    """

    def __init__(
        self, table: PieceTable, skip_ids: frozenset[int], strip: str, num_strip: int
    ) -> None:
        self._table = table
        self._skip_ids = skip_ids
        self._strip = strip
        self._num_strip = num_strip
        self._started = False
        self._run = bytearray()

    def feed(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece is None or token_id in self._skip_ids:
            return ""
        started, self._started = self._started, True
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._without_prefix(self._end_run() + piece[started])

    def flush(self) -> str:
        return self._without_prefix(self._end_run())

    def data(self, token_id: int) -> bytes:
        match self._table[token_id]:
            case None:
                return b""
            case int(byte):
                return bytes([byte])
            case piece:
                return bytes(piece[1], "utf-8")

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _without_prefix(self, text: str) -> str:
        """Return the text without the characters that must be dropped at the very start."""
        while self._num_strip and text:
            if text[0] != self._strip:
                self._num_strip = 0
            else:
                self._num_strip -= 1
                text = text[1:]
        return text


MakeStream = Callable[[frozenset[int]], TextStream]
"""Makes a stream; its argument is the ids that the stream skips."""
Unusual = Callable[[tokenizers.Tokenizer], MakeStream]
"""The row `stream` of the table `tokenizers`: makes the streams of any decoder."""


def stream_factory(backend: tokenizers.Tokenizer) -> MakeStream:
    """Return what makes the streams of a tokenizer. Raises CheckpointError for an unusual decoder,
    unless a package has one for it."""
    # Pickle has the decoder's part of tokenizer.json. Writing all of that file would take 0.2 s.
    decoder = backend.decoder and json.loads(backend.decoder.__getstate__())
    stages = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    match stages:
        case [{"type": "ByteLevel"}]:
            byte_of = _byte_level_alphabet()
            table = PieceTable(backend, lambda token: _byte_level_piece(token, byte_of))
            return lambda skip_ids: _ByteStream(table, skip_ids)
        case [None]:  # there is no decoder: tokens are words
            table = PieceTable(backend, lambda token: (token, " " + token))
        case [{"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}]:
            at_start = " " if scheme == "never" else ""
            table = PieceTable(backend, lambda t: (t.replace(mark, at_start), t.replace(mark, " ")))
        case _:
            if made := _sentencepiece_streams(backend, stages):
                return made
            unusual: Unusual | None = plugins.find("tokenizers", "stream")
            if unusual is None:
                problem = plugins.absent("tokenizers")
                raise CheckpointError(f"the decoder in tokenizer.json {problem}")
            return unusual(backend)
    return lambda skip_ids: _PieceStream(table, skip_ids, "", 0)


def _sentencepiece_streams(
    backend: tokenizers.Tokenizer, stages: list[dict[str, Any]]
) -> MakeStream | None:
    """Return what makes the streams of a converted sentencepiece model; None for another decoder.

    stages: any number of Replace, then perhaps ByteFallback, Fuse and Strip.
    """
    rest = list(stages)
    replacements: list[tuple[str, str]] = []
    has_bytes, strip, num_strip = False, "", 0
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        stage = rest.pop(0)
        replacements.append((stage["pattern"]["String"], stage["content"]))
    if rest and rest[0]["type"] == "ByteFallback":
        has_bytes = bool(rest.pop(0))
    if rest and rest[0]["type"] == "Fuse":
        rest.pop(0)
        if rest and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
            stage = rest.pop(0)
            strip, num_strip = stage["content"], stage["start"]
    if rest:
        return None

    def piece(token: str) -> tuple[str, str] | int:
        for old, new in replacements:
            token = token.replace(old, new)
        if has_bytes and re.fullmatch("<0x[0-9a-fA-F]{2}>", token):
            return int(token[3:5], 16)
        return token, token

    table = PieceTable(backend, piece)
    return lambda skip_ids: _PieceStream(table, skip_ids, strip, num_strip)


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
