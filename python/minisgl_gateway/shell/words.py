"""Writes streamed text to a terminal: wrapped between words, and without control characters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TextIO

from rich.cells import cell_len

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, except line feeds and tabs."""

_BREAKS: Final = re.compile(r"(\s)")
_TAB: Final = 8


class WordWriter:
    """Writes pieces of text word by word. Mutable: it keeps the unfinished word.

    width: returns the columns of the terminal, which may change.
    """

    def __init__(self, file: TextIO, width: Callable[[], int]) -> None:
        self._file = file
        self._width = width
        self._word = ""
        self._column = 0

    def write(self, text: str) -> None:
        """Write the words that `text` completes."""
        *parts, self._word = _BREAKS.split(self._word + _CONTROL.sub("", text))
        for word, space in zip(parts[::2], parts[1::2], strict=True):
            self._write_word(word)
            self._write_space(space)
        # Wide characters have no spaces between words, and a word longer than a line is broken
        # anyway.
        if cell_len(self._word) > len(self._word) or len(self._word) >= self._width():
            self.flush()
        self._file.flush()

    def flush(self) -> None:
        """Write the unfinished word."""
        self._write_word(self._word)
        self._word = ""
        self._file.flush()

    def _write_word(self, word: str) -> None:
        size, width = cell_len(word), self._width()
        if self._column > 0 and self._column + size > width and size <= width:
            self._write_space("\n")
        self._file.write(word)
        if size:
            self._column = (self._column + size - 1) % width + 1

    def _write_space(self, space: str) -> None:
        size = _TAB - self._column % _TAB if space == "\t" else 1
        if space != "\n" and self._column + size <= self._width():
            self._file.write(space)
            self._column += size
        else:
            self._file.write("\n")
            self._column = 0
