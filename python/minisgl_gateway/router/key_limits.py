"""Limits of API keys over all replicas.

Each server counts the requests and tokens that it serves, and reports them in its state; the router
adds them up. It learns a key's limits from the server that it asks for a prompt's hashes. It counts
its own requests when it passes them on, so the limit of requests is exact. Tokens of answers are
counted up to a second late.

The servers' counts include requests of other routers, and of clients that ask a server directly::

    used = passed on by this router + the most by which the servers' counts have exceeded that
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from minisgl_gateway.keys.limits import Limits
from minisgl_gateway.keys.ring import digest_of
from minisgl_gateway.router.replica_state import KeyUse


class KeyLimits:
    """The keys whose limits, perhaps none, a server has reported. Mutable."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[str, _Key] = {}  # by digest
        self._uses: dict[str, dict[str, KeyUse]] = {}  # the last reports, by replica and digest

    def learn(self, use: KeyUse) -> None:
        """Set the limits of a key to those that a server reports."""
        key = self._keys.setdefault(use.digest, _Key(use.name))
        key.limits.change(use.requests_per_minute, use.tokens_per_minute, self._clock())

    def update(self, replica: str, uses: Iterable[KeyUse]) -> None:
        """Count what the keys have used of a replica since its last report. What they used before
        the first report is not counted."""
        before = self._uses.get(replica)
        now = self._clock()
        reported = self._uses[replica] = {use.digest: use for use in uses}
        for use in reported.values():
            self.learn(use)
            if before is None:
                continue
            requests, tokens = use.num_requests, use.num_tokens
            last = before.get(use.digest)
            if last and last.num_requests <= requests:  # else the server counts anew
                requests, tokens = requests - last.num_requests, tokens - last.num_tokens
            self._keys[use.digest].reported(requests, tokens, now)

    def check(self, text: str) -> _Key | None:
        """Return the key with this text; None if it is not known. Raises RateLimited if it has used
        up one of its limits."""
        key = self._keys.get(digest_of(text).hex())
        if key:
            key.limits.check(key.name, self._clock())
        return key

    def admit(self, text: str) -> Passed | None:
        """Count a request of the key with this text, and return it. Returns None if the key is not
        known. Raises RateLimited."""
        key = self.check(text)
        return Passed(key, self._clock) if key else None


class Passed:
    """A request that is passed on, and counted against the limits of its key."""

    def __init__(self, key: _Key, clock: Callable[[], float]) -> None:
        self._key, self._clock = key, clock
        key.limits.take(clock(), requests=1)

    def send(self, num_tokens: int) -> None:
        """Count a prompt that goes to a replica. The replica counts it as well."""
        self._key.own.requests += 1
        self._key.own.tokens += num_tokens
        self._key.limits.take(self._clock(), tokens=num_tokens)

    def take_back(self, num_tokens: int, *, is_counted: bool = True) -> None:
        """Undo `send` for a prompt that the replica did not accept. is_counted: whether the replica
        has counted the request nevertheless."""
        self._key.own.requests -= not is_counted
        self._key.own.tokens -= num_tokens
        self._key.limits.take(self._clock(), tokens=-num_tokens)


class _Count:
    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.tokens = 0


class _Key:
    """A key's counts. Mutable. own: passed on by this router. seen: reported by the servers.
    others: the most by which `seen` has exceeded `own`."""

    def __init__(self, name: str) -> None:
        self.name, self.limits = name, Limits()
        self.own, self.seen, self.others = _Count(), _Count(), _Count()

    def reported(self, requests: int, tokens: int, now: float) -> None:
        """Count what a server reports."""
        self.seen.requests += requests
        self.seen.tokens += tokens
        more_requests = max(self.seen.requests - self.own.requests - self.others.requests, 0)
        more_tokens = max(self.seen.tokens - self.own.tokens - self.others.tokens, 0)
        self.others.requests += more_requests
        self.others.tokens += more_tokens
        self.limits.take(now, requests=more_requests, tokens=more_tokens)
