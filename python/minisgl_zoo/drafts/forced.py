"""Drafts from a request's grammar: the text that must come next, as tokens write it usually.

The names and punctuation of a JSON schema are such a text. Other tokens may spell it, so these
are guesses like any; where the grammar allows one token only, the guess is right.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.req import Req
from minisgl.scheduler.requests import Requests


class Forced:
    """Mutable: it keeps what the grammar proposes until a token of the output differs."""

    name = "grammar"
    is_fresh = False

    def __init__(self, req: Req, requests: Requests) -> None:
        self._masker = req.masker
        self.is_over = req.masker is None
        self._output: list[int] = []
        self._next: Sequence[int] | None = None  # not asked for yet

    def next(self, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may come next."""
        if self._masker is None:
            return ()
        if self._next is None:
            self._next = self._masker.forced(self._output)
        return self._next[:count]

    def add(self, token: int) -> None:
        """Append a token of the output."""
        self._output.append(token)
        is_right = self._next is not None and len(self._next) > 1 and self._next[0] == token
        self._next = self._next[1:] if self._next and is_right else None
