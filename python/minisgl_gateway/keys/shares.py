"""Fair shares of API keys: virtual token counters.

Each key has a counter of the tokens that it was served, divided by its weight. The tag of a request
is the counter plus the tokens that the key's open requests are still expected to take. The
scheduler serves lower tags first, and retracts running requests with higher tags for them. So a key
with a thousand requests does not hold up a key with one. No key starves, because the tags of
waiting requests stay while the counters grow. A key that was idle begins at the lowest tag of the
open requests: it has saved nothing up, but its first request comes before all that the other keys
send later. When no request is open, all keys are equal.

Sources: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024); there the server
compares counters whenever a place is free. Here a tag is set once, when the request comes, as in
Goyal et al., "Start-time Fair Queueing" (SIGCOMM 1996), so the ranks' plans need no state of keys.
Expected tokens that a request does not take lower only later tags.
"""

from __future__ import annotations


class Shares:
    """The shares of keys with open requests. Mutable. num_keys: of all keys so far. highest: the
    counter of the key that was served most."""

    def __init__(self) -> None:
        self.active: set[Share] = set()
        self.num_keys = 0
        self.highest = 0.0


class Share:
    """The counters of one key. Mutable.

    number: of the key, from 1. served: the counter. owed: what its open requests are still expected
    to take; both in tokens divided by `weight`. tags: of its open requests.
    """

    def __init__(self, shares: Shares) -> None:
        shares.num_keys += 1
        self.number = shares.num_keys
        self.weight = 1.0
        self.served = self.owed = 0.0
        self.tags: list[int] = []
        self._shares = shares

    def begin(self, cost: int) -> int:
        """Return the tag of a request that is expected to take `cost` tokens."""
        if not self.tags:
            open_tags = (min(share.tags) for share in self._shares.active)
            level = min(open_tags, default=self._shares.highest)
            self.served = max(self.served, level)
            self._shares.active.add(self)
        tag = int(self.served + self.owed)
        self.owed += cost / self.weight
        self.tags.append(tag)
        return tag

    def serve(self, num_tokens: int, expected: int) -> None:
        """Count tokens that a request was served, of which `expected` were owed."""
        self.served += num_tokens / self.weight
        self._shares.highest = max(self._shares.highest, self.served)
        self.owed -= expected / self.weight

    def end(self, tag: int, left: int) -> None:
        """Count the end of the request with this tag, `left` tokens earlier than expected."""
        self.tags.remove(tag)
        self.owed = self.owed - left / self.weight if self.tags else 0.0
        if not self.tags:
            self._shares.active.discard(self)
