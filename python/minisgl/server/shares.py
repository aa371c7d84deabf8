"""Fair shares of API keys: virtual token counters.

Each key has a counter of the tokens that it was served, divided by its weight. A request is tagged
with the counter and what the key's earlier requests are still expected to take; the scheduler
serves lower tags first. So a key with a thousand requests does not hold up a key with one, and no
key starves: tags of waiting requests stay while counters grow. A key that was idle begins at the
lowest counter of the others, because it saved nothing up.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). There the server
compares counters whenever a place is free; here the tag is set once, when the request comes, so the
ranks' plans need no state of keys. Expected tokens that are not taken lower only later tags.
"""

from __future__ import annotations


class Shares:
    """The keys that have open requests. Mutable."""

    def __init__(self) -> None:
        self.active: set[Share] = set()


class Share:
    """A key's part. Mutable. served, owed: tokens divided by `weight`."""

    def __init__(self, shares: Shares) -> None:
        self.weight = 1.0
        self.served = self.owed = 0.0
        self._shares = shares
        self._num_open = 0

    def begin(self, cost: int) -> int:
        """Return the tag of a request that is expected to take `cost` tokens."""
        if not self._num_open:
            others = (share.served for share in self._shares.active)
            self.served = max(self.served, min(others, default=0.0))
            self._shares.active.add(self)
        tag = int(self.served + self.owed)
        self.owed += cost / self.weight
        self._num_open += 1
        return tag

    def serve(self, num_tokens: int, expected: int) -> None:
        """Count tokens that a request was served; `expected` of them were owed."""
        self.served += num_tokens / self.weight
        self.owed -= expected / self.weight

    def end(self, left: int) -> None:
        """A request has ended, `left` tokens before it was expected to."""
        self._num_open -= 1
        self.owed = self.owed - left / self.weight if self._num_open else 0.0
        if not self._num_open:
            self._shares.active.discard(self)
