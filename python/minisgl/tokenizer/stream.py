"""The text of one request, token by token: the same text as decoding all of its ids at once.

A stream holds back only the text that a later token can change. The decoder in tokenizer.json says
which text that is:

- ByteLevel (Qwen, Llama 3): a token is always the same bytes, so an incremental UTF-8 decoder over
  a table from id to bytes is exact.
- Any other: the row `stream` of the table `tokenizers` has faster streams for pieces of text
  (`minisgl_zoo.piece_stream`). Without the row, and for what it does not know, the library's own
  stream decodes the last ids again with each token.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from minisgl import plugins
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


class TextStream(Protocol):
    """The text of one request. `feed` returns the text that is final with this token, `flush` the
    rest.

    `data` returns the UTF-8 bytes of a token in the middle of a text; they may be a part of a
    character. `held` returns how many characters of the text that is not final yet come before the
    token, if it is the next one. Neither changes the stream.
    """

    def held(self, token_id: int) -> int:
        return 0

    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def data(self, token_id: int) -> bytes: ...


MakeStream = Callable[[frozenset[int]], TextStream]
"""Makes a stream; its argument is the ids that the stream skips."""
MakeStreams = Callable[[tokenizers.Tokenizer, list[Any]], MakeStream | None]
"""The row `stream` of the table `tokenizers`: from a tokenizer and the parts of its decoder to what
makes its streams, or None for another decoder."""


def stream_factory(backend: tokenizers.Tokenizer) -> MakeStream:
    """Return what makes the streams of a tokenizer."""
    # Pickle has the decoder's part of tokenizer.json. Writing all of that file would take 0.2 s.
    decoder = backend.decoder and json.loads(backend.decoder.__getstate__())
    stages = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    if [stage and stage["type"] for stage in stages] == ["ByteLevel"]:
        byte_of = _byte_level_alphabet()
        table = PieceTable(backend, lambda token: _byte_level_piece(token, byte_of))
        return lambda skip_ids: _ByteStream(table, skip_ids)
    others: MakeStreams | None = plugins.find("tokenizers", "stream")
    if others and (made := others(backend, stages)):
        return made
    if stages[0] is None or stages[0]["type"] != "WordPiece":  # encoders write nothing
        logger.info(
            "the tokenizer has an unusual decoder: the library tokenizers decodes each token, "
            "which takes more time"
        )
    return partial(_LibraryStream, backend)


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


class _ByteStream(TextStream):
    """Byte-level BPE: a token is bytes, and may end within a character. Invalid UTF-8 becomes
    U+FFFD."""

    def __init__(self, table: PieceTable, skip_ids: frozenset[int]) -> None:
        self._table = table
        self._skip_ids = skip_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def held(self, token_id: int) -> int:
        # A byte that does not continue the character begins another one, behind U+FFFD.
        begun = self._decoder.getstate()[0] + self.data(token_id)[:1]
        return len(begun.decode(errors="replace")[1:])

    def feed(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece is None or token_id in self._skip_ids:
            return ""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def data(self, token_id: int) -> bytes:
        return self._table[token_id] or b""


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


class _LibraryStream(TextStream):
    """A `DecodeStream`. At the end, `flush` adds the text that it holds back. Mutable."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skip_ids = skip_ids
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._length = 0

    def feed(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        self._ids.append(token_id)
        with _panics_as_errors():
            text = self._stream.step(self._backend, token_id) or ""
        self._length += len(text)
        return text

    def flush(self) -> str:
        if not self._ids:
            return ""
        with _panics_as_errors():
            whole: str = self._backend.decode(self._ids, skip_special_tokens=False)
        return whole[self._length :]

    def data(self, token_id: int) -> bytes:
        with _panics_as_errors():
            text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError in place of a panic of the library, which is no `Exception`.

    A panic must fail one request, not the process.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
            raise
        raise RuntimeError(f"the tokenizers library failed: {error}") from error
