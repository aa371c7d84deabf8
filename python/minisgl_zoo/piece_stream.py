"""Streams of tokenizers whose tokens are pieces of text: words, and those of sentencepiece.

A token is always the same piece, so a table from id to piece is exact. The library's own stream,
which the core has for them, decodes a window of ids twice per token and compares, which takes
several times as long. Its window grows without bound while a model repeats an invalid byte.
"""

from __future__ import annotations

import re
from typing import Any, Final

import tokenizers

from minisgl.tokenizer.stream import MakeStream, PieceTable, TextStream

REPLACEMENT: Final = "\ufffd"
"""Stands for bytes that are not UTF-8."""


class _PieceStream(TextStream):
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

    def held(self, token_id: int) -> int:
        is_byte = isinstance(self._table[token_id], int)  # then it continues the run
        return len(self._run.decode(errors="ignore") if is_byte else self._text_of_run())

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

    def _text_of_run(self) -> str:
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._run)

    def _end_run(self) -> str:
        text = self._text_of_run()
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


def piece_streams(backend: tokenizers.Tokenizer, stages: list[Any]) -> MakeStream | None:
    """Return what makes the streams of a tokenizer; None for another decoder. stages: the parts of
    its decoder, as in tokenizer.json."""
    match stages:
        case [None]:  # there is no decoder: tokens are words
            table = PieceTable(backend, lambda token: (token, " " + token))
        case [{"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}]:
            at_start = " " if scheme == "never" else ""
            table = PieceTable(backend, lambda t: (t.replace(mark, at_start), t.replace(mark, " ")))
        case _:
            return _sentencepiece_streams(backend, stages)
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
