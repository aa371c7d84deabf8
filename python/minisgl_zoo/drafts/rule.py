"""How many drafts a step computes: as many as raise the expected tokens per second.

Each drafter follows each request token by token, whether its drafts are computed or not, so its
rate of right guesses is known without a trial. It depends most on the number of right guesses just
before, the *streak*: the rate is measured for each class of streaks. A draft survives if it and all
before it are right, so its chance is the product of the rates of a growing streak.

A step of n rows takes `StepTimes.step_s(n)`. Drafts are added, the likeliest first, while they
raise

    expected tokens / (time of the step with its drafts + time of the host)

and the step has drafts only if that beats the same step without, which overlaps with the host.
Beside other requests they add at most what the stall bound allows a prompt.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from minisgl.core.plan import MOST_DRAFT_ROWS, MOST_DRAFTS
from minisgl.core.req import Req
from minisgl.core.step_times import PLANNED_SHARE, StepTimes
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.drafting import Draft
from minisgl.scheduler.requests import Requests

MOST_STREAMS: Final = 32
"""Requests of more streams are not followed: that would take the host longer than a plan does."""
HOST_S: Final = 0.4e-3
"""A step with drafts is planned and launched after the one before it has ended. This is the least
time of commit, plan and launch: that on a CPU's host."""
PLAN_S: Final = 0.2e-3
"""The part of commit and plan in it; `StepTimes.gap_us` is the rest on a GPU."""
LEAST_GAIN: Final = 1.03
"""The predicted rate with drafts over the rate without, from which a step has drafts: step times
are predicted to a few percent."""
DECAY: Final = 0.99
"""The weight of a guess relative to the next one of its class: about the last hundred count."""


class Drafter(Protocol):
    """The guesses of one drafter for one request. is_over: it has none any more. is_fresh: each
    step makes a guess of the next token, which does not continue the guess before."""

    @property
    def name(self) -> str: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def is_fresh(self) -> bool: ...

    def next(self, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may come next."""

    def add(self, token: int) -> None:
        """Append a token of the output."""


@dataclass(slots=True)
class Rate:
    """The rate of right guesses. Mutable. It begins at a half, worth two guesses."""

    right: float = 1.0
    count: float = 2.0

    def add(self, is_right: bool) -> None:
        self.right = self.right * DECAY + is_right
        self.count = self.count * DECAY + 1

    @property
    def value(self) -> float:
        return self.right / self.count


@dataclass(slots=True)
class _Guess:
    drafter: Drafter
    streak: int = 0


@dataclass(slots=True)
class _Followed:
    """A request's drafters, which know the first `num_seen` tokens of its output. Mutable."""

    guesses: list[_Guess]
    num_seen: int = 0


@dataclass(order=True, slots=True)
class _Candidate:
    """A request's next draft. Mutable: `count` of its tokens are taken. Sorts by chance, the
    highest first, then by the request's place in the step."""

    minus_chance: float
    index: int
    req: Req = field(compare=False)
    tokens: Sequence[int] = field(compare=False)
    streak: int = field(compare=False)
    rates: list[Rate] = field(compare=False)
    drafter: str = field(compare=False)
    count: int = field(default=0, compare=False)

    def worth(self) -> float:
        """Return how many of the tokens are expected to be right."""
        chance, sum = -self.minus_chance, 0.0
        for index in range(1, len(self.tokens) + 1):
            sum += chance
            chance *= self.rates[_class_of(self.streak + index)].value
        return sum

    def advance(self) -> None:
        """Let the chance be that of the token behind those that are taken."""
        self.minus_chance *= self.rates[_class_of(self.streak + self.count)].value


class DraftRule:
    """`Drafts` from drafters that follow each request. Mutable: it keeps the measured rates."""

    def __init__(
        self,
        drafters: Sequence[Callable[[Req, Requests], Drafter]],
        config: SchedulerConfig,
        requests: Requests,
    ) -> None:
        """drafters: each makes the drafter of a request. config: has step times."""
        assert config.step_times is not None
        self._times = config.step_times
        self._host_s = max(HOST_S, PLAN_S + self._times.gap_us * 1e-6)
        self._most_s = PLANNED_SHARE * (config.max_stall_s or math.inf)
        self._drafters = drafters
        self._requests = requests
        self._rates: dict[str, list[Rate]] = {}

    def take_all(self) -> None:
        """From now on, let nearly each guess be a draft, as if a row took no time: for checks."""
        self._times = StepTimes(prompt_us=self._times.prompt_us, decode_us=1.0)
        self._host_s, self._most_s = 0.0, math.inf

    def pays(self, running: Sequence[Req], num_rows: int) -> bool:
        if num_rows > MOST_STREAMS:
            return False
        return bool(self._allot(running, num_rows, MOST_DRAFT_ROWS - num_rows, num_unknown=1))

    def propose(self, reqs: Sequence[Req], num_rows: int, room: int) -> list[Draft]:
        if num_rows > MOST_STREAMS:
            return []
        room = min(room, MOST_DRAFT_ROWS - num_rows)
        allotted = self._allot(reqs, num_rows, room, num_unknown=0)
        return [Draft(one.req, list(one.tokens[: one.count]), one.drafter) for one in allotted]

    def _allot(
        self, reqs: Sequence[Req], num_rows: int, room: int, num_unknown: int
    ) -> list[_Candidate]:
        """Return the requests that get drafts, with their number; none if they would not pay.

        num_unknown: so many tokens of each request are in flight. They must be right, too.
        """
        times = self._times
        if times.row_us * 1e-6 * num_rows >= times.step_s(num_rows) + self._host_s:
            return []  # not even a certain draft would pay
        found = (self._best(index, req, num_unknown) for index, req in enumerate(reqs))
        candidates = [candidate for candidate in found if candidate]
        if not candidates:
            return []
        plain_s = times.step_s(num_rows, sum(req.num_known for req in reqs))
        seconds, expected = plain_s + self._host_s, float(num_rows)
        heapq.heapify(candidates)
        taken: dict[int, _Candidate] = {}
        # The drafts of one request may hold up the others as long as a prompt may.
        most_s = seconds + self._most_s if num_rows > 1 else math.inf
        while candidates and room > 0:
            best = heapq.heappop(candidates)
            chance = -best.minus_chance
            row_s = times.row_us * 1e-6 + times.context_ns * best.req.num_known * 1e-9
            if chance * seconds <= expected * row_s or seconds + row_s > most_s:
                continue  # no further draft of this request pays
            seconds, expected, room = seconds + row_s, expected + chance, room - 1
            best.count += 1
            taken[best.index] = best
            if best.count < len(best.tokens):
                best.advance()
                heapq.heappush(candidates, best)
        pays = expected * plain_s > LEAST_GAIN * num_rows * seconds
        return list(taken.values()) if pays else []

    def _best(self, index: int, req: Req, num_unknown: int) -> _Candidate | None:
        """Return the likeliest next draft of a request, behind the tokens in flight. A fresh guess
        is one token, so the other drafter's tokens must be worth less, all together."""
        best: _Candidate | None = None
        fresh: _Candidate | None = None
        for guess in self._follow(req).guesses:
            num_before = 0 if guess.drafter.is_fresh else num_unknown
            tokens = guess.drafter.next(MOST_DRAFTS + num_before)
            if len(tokens) <= num_before:
                continue
            name = guess.drafter.name
            rates = self._rates_of(name)
            candidate = _Candidate(-1.0, index, req, tokens, guess.streak, rates, name)
            candidate.advance()
            for _ in range(num_before):
                candidate.streak += 1
                candidate.advance()
            candidate.tokens = tokens[num_before:]
            if guess.drafter.is_fresh:
                fresh = candidate
            elif best is None or candidate < best:
                best = candidate
        if fresh and (best is None or best.worth() < fresh.worth()):
            return fresh
        return best

    def _follow(self, req: Req) -> _Followed:
        """Let the drafters see the tokens that were committed since the last call."""
        followed: _Followed | None = req.drafts
        if followed is None:
            drafters = [create(req, self._requests) for create in self._drafters]
            followed = _Followed([_Guess(drafter) for drafter in drafters])
            req.drafts = followed
        for token in req.output[followed.num_seen :]:
            if any(guess.drafter.is_over for guess in followed.guesses):
                followed.guesses = [each for each in followed.guesses if not each.drafter.is_over]
            for guess in followed.guesses:
                if guessed := guess.drafter.next(1):
                    is_right = guessed[0] == token
                    self._rates_of(guess.drafter.name)[_class_of(guess.streak)].add(is_right)
                    guess.streak = guess.streak + 1 if is_right else 0
                guess.drafter.add(token)
        followed.num_seen = len(req.output)
        return followed

    def _rates_of(self, name: str) -> list[Rate]:
        if name not in self._rates:
            self._rates[name] = [Rate() for _ in range(_NUM_CLASSES)]
        return self._rates[name]


_NUM_CLASSES: Final = 6


def _class_of(streak: int) -> int:
    """Return the class of a streak: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 and more."""
    return min(streak.bit_length(), _NUM_CLASSES - 1)
