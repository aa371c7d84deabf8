"""The router's view of each replica: its last state, and the requests that were sent since.

A state is up to a second old. It does not count requests that were sent later, so the router counts
their tokens as queued and their prefixes as cached, until a newer state includes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl_gateway.router.choice import Load, choose
from minisgl_gateway.router.index import PrefixIndex, noted_lengths
from minisgl_gateway.router.replica_state import ReplicaState

USUAL_OUTPUT: Final = 256.0
"""A mean answer is taken to have so many tokens until one has ended."""

ARRIVAL_S: Final = 0.1
"""A state includes requests that were sent at least this long before the router asked for it."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request that was sent to a replica. Mutable.

    num_new: prompt tokens that the replica is expected to compute. hashes: those that the index has
    for it. at: when it was sent. started_at: when the first byte of its answer came. is_queued: no
    state includes it yet.
    """

    num_new: int
    hashes: list[int]
    at: float
    started_at: float | None = None
    is_queued: bool = True


class View:
    """One replica's state, and what was sent to it since. Mutable; `Views` owns it."""

    def __init__(self) -> None:
        self.state: ReplicaState | None = None
        self.state_at = 0.0  # when it was asked for
        self.hashes: frozenset[int] = frozenset()
        self.sent: list[Sent] = []

    def load(self, now: float, usual_output: float = 0.0) -> Load:
        """Return the load of the last state, plus the requests sent since, minus the tokens that
        the replica has computed since at its rate. usual_output: the tokens of a mean answer."""
        state = self.state
        if state is None:
            queued = [sent for sent in self.sent if sent.is_queued]
            waits = sum(sent.num_new for sent in queued if sent.started_at is None)
            return Load(queued_tokens=waits, num_waiting=len(queued))
        rate = state.prefill_tokens_per_s
        tokens, since = float(state.queued_tokens), self.state_at
        num_queued = new_pages = 0
        for sent in self.sent:
            if sent.is_queued:
                num_queued += 1
                new_pages += -(-sent.num_new // state.page_size)
                at = max(sent.at, since)
                tokens, since = max(tokens - rate * (at - since), 0.0), at
                tokens += sent.num_new if sent.started_at is None else 0
        return Load(
            queued_tokens=round(max(tokens - rate * (now - since), 0.0)),
            num_waiting=num_queued + state.num_waiting,
            num_running=state.num_running,
            max_running=state.max_running,
            num_free_pages=max(state.num_free_pages - new_pages, 0),
            page_size=state.page_size,
            prefill_tokens_per_s=rate,
            finished_per_s=state.finished_per_s,
            slowdown_s=state.row_s * usual_output,
        )


class Views:
    """All replicas, and the index of their prefixes. Mutable."""

    def __init__(self) -> None:
        self._index: PrefixIndex[View] = PrefixIndex()

    def update(self, view: View, state: ReplicaState, asked_at: float) -> None:
        """Set a replica's state. asked_at: when the router asked for it, on `Sent.at`'s clock."""
        hashes = frozenset(np.frombuffer(state.hashes, "<u8").tolist())
        self._index.add(view, hashes - view.hashes)
        self._index.remove(view, view.hashes - hashes)
        view.state, view.state_at, view.hashes = state, asked_at, hashes
        kept = []
        for sent in view.sent:
            if sent.at < asked_at - ARRIVAL_S:
                sent.is_queued = False  # the state counts it
            if sent.started_at is not None and sent.started_at < asked_at:
                self._index.remove(view, sent.hashes)  # its prefix is in the state's
            else:
                kept.append(sent)
        view.sent = kept

    def forget(self, view: View) -> None:
        """Drop the state and prefixes of a replica that is down: its cache will be empty."""
        self._index.remove(view, view.hashes)
        for sent in view.sent:
            self._index.remove(view, sent.hashes)
        view.state, view.hashes, view.sent = None, frozenset(), []

    def cached_tokens(
        self, views: Sequence[View], hashes: Sequence[int], page_size: int
    ) -> dict[int, int]:
        """Return how many tokens of a prompt each replica has cached, by its index in `views`."""
        held = self._index.pages_held(hashes)
        return {index: held[view] * page_size for index, view in enumerate(views) if view in held}

    def choose(
        self,
        views: Sequence[View],
        num_tokens: int,
        hashes: Sequence[int],
        page_size: int,
        now: float,
    ) -> tuple[View, int]:
        """Return the replica where a prompt costs least, and the number of tokens cached there.

        now: on the clock of `Sent.at`. hashes: of the prompt's prefixes of 1, 2, 3, ... pages.
        """
        cached = self.cached_tokens(views, hashes, page_size)
        usual = _usual_output(views)
        best = choose([view.load(now, usual) for view in views], num_tokens, cached)
        return views[best], cached.get(best, 0)

    def send(self, view: View, num_new: int, hashes: Sequence[int], now: float) -> Sent:
        """Note a request that goes to `view`."""
        noted = [hashes[length - 1] for length in noted_lengths(len(hashes))]
        sent = Sent(num_new=num_new, hashes=noted, at=now)
        view.sent.append(sent)
        self._index.add(view, noted)
        return sent

    def take_back(self, view: View, sent: Sent) -> None:
        """Undo `send` for a request that did not start: it was refused, or its client left."""
        if sent in view.sent:
            view.sent.remove(sent)
            self._index.remove(view, sent.hashes)


def _usual_output(views: Sequence[View]) -> float:
    """Return the tokens of a mean answer over all replicas, so that their requests weigh alike."""
    states = [view.state for view in views if view.state]
    num_finished = sum(state.num_finished for state in states)
    if not num_finished:
        return USUAL_OUTPUT
    return sum(state.num_output_tokens for state in states) / num_finished
