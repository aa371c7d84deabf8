"""Finds stop strings in a text that arrives in pieces.

One automaton for each stop string (Knuth, Morris, Pratt 1977) reads the text once, character by
character. Its state is the length of the longest suffix of the text that is a prefix of the stop
string; that suffix is held back. So the result does not depend on how the text was cut, and the
time of a token is proportional to its characters, whatever the stop strings are.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, up to the first complete stop string. Mutable: the state of one request.

    If several stop strings are complete at one character, the longest counts. included: whether the
    text ends behind the stop string instead of before it. match: the stop string that was found; no
    text may be fed after that.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        self._included = included
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.match: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that cannot be a part of a stop string any more."""
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            char = buffer[end - 1]
            for i, stop in enumerate(self._stops):
                state = self._states[i]
                while state and stop[state] != char:
                    state = self._fallbacks[i][state]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    self.match = stop
                    self._held = ""
                    return buffer[: end if self._included else end - state]
                self._states[i] = state
        num_free = len(buffer) - max(self._states)
        self._held = buffer[num_free:]
        return buffer[:num_free]

    def flush(self) -> str:
        """Return the text that was held back. Call it when the text has ended."""
        held, self._held = self._held, ""
        return held


def _fallback(stop: str) -> list[int]:
    """Return for each n the length of the longest proper suffix of stop[:n] that is also its
    prefix."""
    table = [0] * len(stop)
    length = 0
    for n in range(2, len(stop)):
        while length and stop[length] != stop[n - 1]:
            length = table[length]
        if stop[length] == stop[n - 1]:
            length += 1
        table[n] = length
    return table
