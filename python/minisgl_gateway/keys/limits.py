"""The limits of an API key: a token bucket of requests, and one of tokens."""

from __future__ import annotations

from minisgl.errors import RequestError


class RateLimited(RequestError):
    """An API key has reached a limit of a minute.

    retry_after_s: seconds until the same request is within the limit.
    """

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Bucket:
    """A token bucket: it holds at most a minute's amount, refills evenly, and may be negative.
    Mutable."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return the seconds until the bucket holds one unit; 0 if it does."""
        self._refill(now)
        return max(1 - self._level, 0) * 60 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        refilled = self._level + (now - self._at) * self.per_minute / 60
        self._level, self._at = min(refilled, self.per_minute), now


class Limits:
    """The two buckets of a key. Mutable. Without a bucket there is no limit."""

    def __init__(self) -> None:
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None

    def change(self, requests: int | None, tokens: int | None, now: float) -> None:
        """Set the amounts of a minute. An unchanged limit keeps its count."""
        self._requests = _changed(self._requests, requests, now)
        self._tokens = _changed(self._tokens, tokens, now)

    @property
    def per_minute(self) -> tuple[int | None, int | None]:
        """The limits of requests and of tokens; None is no limit."""
        requests, tokens = (
            bucket.per_minute if bucket else None for bucket in (self._requests, self._tokens)
        )
        return requests, tokens

    def check(self, name: str, now: float) -> None:
        """Raise RateLimited if the key `name` has used up one of its limits."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket and (wait_s := bucket.wait_s(now)):
                raise RateLimited(
                    f"the key {name!r} has used its {bucket.per_minute} {what} a minute; try "
                    f"again in {wait_s:.1f} s",
                    retry_after_s=wait_s,
                )

    def take(self, now: float, *, requests: float = 0, tokens: float = 0) -> None:
        """Count what was used.

        Tokens are counted as they come. So the last admitted request may exceed the limit, and the
        next one then waits longer.
        """
        if self._requests and requests:
            self._requests.take(requests, now)
        if self._tokens and tokens:
            self._tokens.take(tokens, now)


def _changed(old: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if old and old.per_minute == per_minute:
        return old
    return Bucket(per_minute, now) if per_minute else None
