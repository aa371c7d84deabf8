"""The index of cached prefixes: finds the replicas that hold a prompt's pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

R = TypeVar("R")


class PrefixIndex(Generic[R]):
    """The hashes of all replicas' prefixes. Mutable.

    A lookup costs one access for each page of the prompt, for any number of replicas.
    """

    def __init__(self) -> None:
        self._holders: dict[int, dict[R, int]] = {}  # by hash: how often `add` named each replica

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, replica: R, hashes: Iterable[int]) -> None:
        for hash_ in hashes:
            holders = self._holders.setdefault(hash_, {})
            holders[replica] = holders.get(replica, 0) + 1

    def remove(self, replica: R, hashes: Iterable[int]) -> None:
        """Undo an `add` of the same hashes."""
        for hash_ in hashes:
            holders = self._holders[hash_]
            holders[replica] -= 1
            if not holders[replica]:
                del holders[replica]
                if not holders:
                    del self._holders[hash_]

    def pages_held(self, hashes: Sequence[int]) -> dict[R, int]:
        """Return the number of a prompt's leading pages that each replica holds.

        hashes: of the prompt's prefixes of 1, 2, 3, ... pages. A replica that holds a longer prefix
        is taken to hold the shorter ones. Replicas that hold none are left out.
        """
        held: dict[R, int] = {}
        for index in range(len(hashes) - 1, -1, -1):
            for replica in self._holders.get(hashes[index], ()):
                held.setdefault(replica, index + 1)
        return held


def noted_lengths(num_pages: int) -> list[int]:
    """Return the lengths in pages of the prefixes that are noted for a prompt of `num_pages` pages:
    1, 2, 4, 8, ... and `num_pages`. The next state of the replica has all lengths."""
    powers = [1 << bit for bit in range(num_pages.bit_length()) if 1 << bit < num_pages]
    return [*powers, num_pages] if num_pages else []
