"""Drafts from a request's own tokens: what followed the last three when they stood there before.

The client's `prediction` of the answer counts as text before the prompt.

An answer often repeats its prompt: a file that is edited, a quoted passage, a table's names. The
idea is prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np

from minisgl.core.req import Req
from minisgl.scheduler.requests import Requests

MOST_TOKENS: Final = 32_768
"""Of a prompt, the last ones: sorting their grams takes the host about 10 ms, once."""
GRAM: Final = 3
"""Two tokens stand in too many places, and after a wrong draft four would be found again later."""
_SHIFT: Final = 21
"""Bits of a token in the key of a gram. No vocabulary has 2 ** 21 ids."""
_MASK: Final = (1 << GRAM * _SHIFT) - 1


class History:
    """The tokens of a request, and where each gram stood last. Mutable: it grows with the output.

    The grams of the prompt are sorted once: a dictionary of 100,000 of them would take 15 MB.
    """

    name = "ngram"
    is_over = False
    is_fresh = False

    def __init__(self, req: Req, requests: Requests) -> None:
        ids = np.concatenate((req.prediction, req.prompt))[-MOST_TOKENS:].astype(np.int64)
        letters = ids + 1  # 0 stands for no token, where there are fewer than a gram has
        keys = letters[: 1 - GRAM]
        for offset in range(1, GRAM):
            keys = keys << _SHIFT | letters[offset : len(ids) - GRAM + 1 + offset]
        order = np.argsort(keys[:-1], kind="stable")  # the last gram is looked for
        self._keys: list[int] = keys[order].tolist()
        self._order: list[int] = order.tolist()
        self._places: dict[int, int] = {}  # of later grams: key -> the token after it
        self._ids: list[int] = ids.tolist()
        self._key = 0  # of the last gram
        for token in self._ids[-GRAM:]:
            self._key = self._key << _SHIFT | token + 1
        self._at = self._find()
        self._places[self._key] = len(self._ids)

    def next(self, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may come next."""
        return () if self._at is None else self._ids[self._at : self._at + count]

    def add(self, token: int) -> None:
        """Append a token of the output."""
        at, ids = self._at, self._ids
        is_right = at is not None and ids[at] == token
        ids.append(token)
        self._key = (self._key << _SHIFT | token + 1) & _MASK
        self._at = at + 1 if at is not None and is_right else self._find()
        self._places[self._key] = len(ids)

    def _find(self) -> int | None:
        """Return the token after the last gram where it stood before: in the output, or else in the
        prompt."""
        at = self._places.get(self._key)
        if at is None:
            index = bisect_right(self._keys, self._key) - 1
            if index >= 0 and self._keys[index] == self._key:
                at = self._order[index] + GRAM
        return at if at is not None and at < len(self._ids) else None
