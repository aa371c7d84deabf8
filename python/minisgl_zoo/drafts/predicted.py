"""Drafts from the model's own layer of multi-token prediction (`minisgl_zoo.drafts.guesser`)."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.req import Req
from minisgl.scheduler.requests import Requests


class Predicted:
    """Mutable: it counts the tokens of the output. A step guesses behind each token that it
    samples, so there is one guess, and always one for the next step."""

    name = "mtp"
    is_over = False
    is_fresh = True

    def __init__(self, req: Req, requests: Requests) -> None:
        self._guesses = req.guesses
        self._num_added = 0
        # An answer that goes on here has tokens that another engine has sampled.
        self._first = len(req.output) - len(req.guesses)

    def next(self, count: int) -> Sequence[int]:
        """Return the token that may come next, unless the layer's logits were not finite."""
        at = self._num_added - 1 - self._first
        guess = self._guesses[at] if 0 <= at < len(self._guesses) else -1
        return [guess] if guess >= 0 else ()

    def add(self, token: int) -> None:
        """Append a token of the output."""
        self._num_added += 1
