"""Drafts by a script that knows the answers: an adversary and an oracle of stated acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from minisgl.core.req import Req
from minisgl.scheduler.drafting import Draft

KINDS: Final = ("never", "always", "all but the last", "every other", "at random")


class ScriptedDrafts:
    """`Drafts` for a scheduler whose requests have these answers, by uid. Mutable: it counts.

    kind: which drafts are right, one of `KINDS`; by chance if it is not given. It drafts in a share
    of the steps, so steps with and without drafts follow each other.
    """

    def __init__(
        self,
        rng: random.Random,
        answers: Sequence[Sequence[int]],
        vocab_size: int,
        kind: str | None = None,
        tokens: Callable[[Req], list[int]] | None = None,
    ) -> None:
        """tokens: returns the drafts of a request, for every step, instead of `answers`."""
        self._given = tokens
        self._rng, self._answers, self._vocab_size = rng, answers, vocab_size
        self.kind = kind or rng.choice(KINDS)
        self._share = rng.choice([0.3, 1.0])

    def pays(self, running: Sequence[Req], num_rows: int) -> bool:
        return self._rng.random() < self._share

    def propose(self, reqs: Sequence[Req], num_rows: int, room: int) -> list[Draft]:
        proposed = []
        for req in reqs:
            if self._given:
                tokens = self._given(req)[:room]
                room -= len(tokens)
                proposed.append(Draft(req, tokens, "scripted"))
            elif self._rng.random() < self._share:
                tokens = self._tokens(req, self._rng.randint(0, min(room, 9)))
                room -= len(tokens)
                proposed.append(Draft(req, tokens, "scripted"))
        return proposed

    def _tokens(self, req: Req, count: int) -> list[int]:
        answer, at = self._answers[req.uid], len(req.output)
        tokens = []
        for index in range(count):
            token = answer[at + index] if at + index < len(answer) else 0
            is_wrong = {
                "never": True,
                "always": False,
                "all but the last": index == count - 1,
                "every other": index % 2 == 1,
                "at random": self._rng.random() < 0.4,
            }[self.kind]
            tokens.append((token + is_wrong) % self._vocab_size)
        return tokens
