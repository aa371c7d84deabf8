"""Fair shares of API keys: virtual token counters.

Each key has a counter of the tokens that it was served, divided by its weight. A request is tagged
with the counter and what the key's earlier requests are still expected to take; the scheduler
serves lower tags first, and takes the places of running requests with higher ones. So a key with a
thousand requests does not hold up a key with one, and no key starves: tags of waiting requests stay
while counters grow. A key that was idle begins at the lowest tag of the open requests: it has saved
nothing up, but its first request comes before all requests that the others have sent since. When no
request is open, all keys are equal.

Sources: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024); there the server
compares counters whenever a place is free. Here the tag is set once, when the request comes, as in
Goyal et al., "Start-time Fair Queueing" (SIGCOMM 1996), so the ranks' plans need no state of keys.
Expected tokens that are not taken lower only later tags.
"""

from __future__ import annotations


class Shares:
    """The keys that have open requests. Mutable. num_keys: the number of all keys so far. highest:
    the counter of the key that was served most."""

    def __init__(self) -> None:
        self.active: set[Share] = set()
        self.num_keys = 0
        self.highest = 0.0


class Share:
    """The counters of one key. Mutable. number: keys are numbered from 1. served, owed: tokens
    divided by `weight`. tags: those of its open requests."""

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
        """Count tokens that a request was served; `expected` of them were owed."""
        self.served += num_tokens / self.weight
        self._shares.highest = max(self._shares.highest, self.served)
        self.owed -= expected / self.weight

    def end(self, tag: int, left: int) -> None:
        """The request with this tag has ended, `left` tokens before it was expected to."""
        self.tags.remove(tag)
        self.owed = self.owed - left / self.weight if self.tags else 0.0
        if not self.tags:
            self._shares.active.discard(self)
