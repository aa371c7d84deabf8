"""Counts the API process's requests: their times, ends and errors.

`minisgl.server.api.metrics` makes a Prometheus page from these counters. Times are what a
client sees without the network: from the message to the tokenizer to the arrival of text. Why not
the histogram of Prometheus's library: it takes a lock and several calls per value, and each piece
of text is a value.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from minisgl.core import Finished, SamplingParams
from minisgl.message import StatusReply
from minisgl.server.clients import Origin

# Seconds, three bounds a decade: a quantile from a bucket is wrong by a factor of 2.5 at most.
_STEPS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SHORT: Final = _STEPS  # between two pieces of text
LONG: Final = (*_STEPS, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)  # of a whole request


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedPrompt:
    """A prompt that ends now.

    seconds: since its submission. first_text_s: from its submission to its first text; None if it
    had none. reason: one of `Observer.ends`. code: of the error, if the reason is "error". end: the
    scheduler's report; None if it was aborted or failed.
    """

    origin: Origin
    uid: int
    sampling: SamplingParams
    seconds: float
    first_text_s: float | None
    reason: str
    code: str | None
    end: Finished | None


class PromptWatcher(Protocol):
    """Is told each prompt once, when it ends. It never raises and never waits."""

    def ended(self, prompt: EndedPrompt) -> None: ...

    def close(self) -> None:
        """Called once, when the server ends. Takes a bounded time."""


class Histogram:
    """Mutable. counts[i]: how many values are in (bounds[i - 1], bounds[i]]; the last has no upper
    bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class _Request:
    """One open request, with the times of its submission, first and last text. Mutable."""

    __slots__ = ("first_at", "last_at", "origin", "sampling", "submitted_at")

    def __init__(self, origin: Origin, sampling: SamplingParams, now: float) -> None:
        self.origin = origin
        self.sampling = sampling
        self.submitted_at = now
        self.first_at = self.last_at = 0.0


class Observer:
    """Counts what the frontend reports; times are on `time.perf_counter`. Mutable.

    watchers: get each request that ends. cost: device seconds and joules of the requests that
    ended; None if no energy can be read. images: the sums of `Finished.images`. status: each rank's
    last report. start_s: seconds of each part of the server's start.
    """

    def __init__(self, watchers: Sequence[PromptWatcher] = ()) -> None:
        self.time_to_first_token = Histogram(LONG)
        self.inter_token = Histogram(SHORT)
        self.request = Histogram(LONG)
        self.queue = Histogram(LONG)
        self.ends: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.errors: Counter[str] = Counter()
        self.cost: tuple[float, float] | None = None
        self.images: tuple[int, int, float] | None = None
        self.status: dict[int, StatusReply] = {}
        self.start_s: dict[str, float] = {}
        self.num_restarts = 0
        self._watchers = watchers
        self._open: dict[int, _Request] = {}
        self._noted: dict[int, str] | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def oldest_token_age_s(self) -> float:
        """The longest time of an open request since its last text, or since its submission if it
        has none. 0 if no request is open."""
        waiting_since = (r.last_at or r.submitted_at for r in self._open.values())
        now = time.perf_counter()
        return now - min(waiting_since, default=now)

    def submitted(
        self, uids: Sequence[int], origin: Origin, sampling: SamplingParams, now: float
    ) -> None:
        for uid in uids:
            self._open[uid] = _Request(origin, sampling, now)
            if self._noted is not None:
                self._noted[uid] = origin.request_id

    def rename(self, uid: int, new: int) -> None:
        """Know an open request by another uid."""
        self._open[new] = self._open.pop(uid)
        if self._noted is not None:
            self._noted[new] = self._open[new].origin.request_id

    def text(self, uid: int, now: float) -> None:
        """Count a piece of text, usually of one token."""
        request = self._open[uid]
        if request.last_at:
            self.inter_token.observe(now - request.last_at)
        else:
            request.first_at = now
            self.time_to_first_token.observe(now - request.submitted_at)
        request.last_at = now

    def finished(self, end: Finished, now: float) -> None:
        request = self._open[end.uid]
        self.request.observe(now - request.submitted_at)
        self.queue.observe(end.queued_s)
        if end.cost:
            device_s, joules = self.cost or (0.0, 0.0)
            self.cost = device_s + end.cost[0], joules + end.cost[1]
        if end.images:
            shown, computed, seconds = self.images or (0, 0, 0.0)
            more = end.images
            self.images = shown + more[0], computed + more[1], seconds + more[2]
        self.ended(end.uid, end.reason, end=end)

    def ended(
        self,
        uid: int,
        reason: str,
        *,
        code: str | None = None,
        end: Finished | None = None,
    ) -> None:
        """Count an end. reason: a key of `ends`. code: of the error, if the reason is "error"."""
        request = self._open.pop(uid)
        self.ends[reason] += 1
        if not self._watchers:
            return
        prompt = EndedPrompt(
            origin=request.origin,
            uid=uid,
            sampling=request.sampling,
            seconds=time.perf_counter() - request.submitted_at,
            first_text_s=request.first_at - request.submitted_at if request.first_at else None,
            reason=reason,
            code=code,
            end=end,
        )
        for watcher in self._watchers:
            watcher.ended(prompt)

    def answered(self, code: str) -> None:
        """Count an error that a client got. code: of the error."""
        self.errors[code] += 1

    def close(self) -> None:
        """Close the watchers, in bounded time."""
        for watcher in self._watchers:
            watcher.close()

    # --- request ids of a profile ----------------------------------------------------------------

    def note_ids(self) -> None:
        """Keep the ids of the open requests, and of all that come until `noted_ids`."""
        opened = {uid: request.origin.request_id for uid, request in self._open.items()}
        self._noted = (self._noted or {}) | opened  # the profile of a rank may run already

    def noted_ids(self) -> dict[int, str]:
        """Return the kept X-Request-Ids by uid, and keep no more."""
        noted, self._noted = self._noted or {}, None
        return noted
