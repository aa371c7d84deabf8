"""Writes values, counts and sizes for messages."""

from __future__ import annotations

import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxlong = 40


def brief(value: object) -> str:
    """Return repr(value), with "..." in the middle if it is long.

    An error quotes what a client sent, which may be megabytes.
    """
    return _REPR.repr(value)


def shortened(text: str, most: int) -> str:
    """Return the first `most` characters, and "..." if there are more, without quotes."""
    return text if len(text) <= most else f"{text[:most]}..."


def counted(number: int, noun: str) -> str:
    """Return ``1 token`` or ``2 tokens``; for nouns that take an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size_of(num_bytes: int) -> str:
    """Return a number of bytes in the largest unit of KiB, MiB and GiB that it reaches."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode the text. JSON can hold one half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def num_levels(value: Any, most: int) -> int:
    """Return the number of levels of nested objects and lists; `most` + 1 if there are more."""
    levels, items = 0, [value]
    while items := [item for item in items if isinstance(item, dict | list)]:
        levels += 1
        if levels > most:
            break
        items = [
            inner
            for outer in items
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return levels
