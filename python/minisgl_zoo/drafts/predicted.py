"""Drafts from guesses that a step makes behind the tokens that it samples: by the model's own layer
of multi-token prediction (`minisgl_zoo.drafts.guesser`) or by a draft model
(`minisgl_zoo.drafts.draft_model`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from minisgl.core.req import Req
from minisgl.scheduler.requests import Requests


class Predicted:
    """Mutable: the guesses of the tokens that come next. A step makes new ones behind its last
    token, and there are always some for the next step. Those behind an earlier token of the step
    go on while they are right."""

    name = "mtp"
    is_over = False
    is_fresh = True

    def __init__(self, req: Req, requests: Requests) -> None:
        self._guesses = req.guesses
        self._chain: list[int] = []
        # An answer that goes on here has tokens that another engine has sampled.
        self._at = len(req.guesses) - len(req.output)

    def next(self, count: int) -> Sequence[int]:
        """Return tokens that may come next."""
        return self._chain[:count]

    def add(self, token: int) -> None:
        """Append a token of the output."""
        rest = self._chain[1:] if self._chain[:1] == [token] else []
        new = self._guesses[self._at] if 0 <= self._at < len(self._guesses) else []
        self._chain = list(takewhile(lambda guess: guess >= 0, new)) or rest
        self._at += 1


class Drafted(Predicted):
    name = "draft"
