"""Whether the memory holds a second engine beside one that runs.

An engine takes a share of what is free when it starts, and then keeps it. So a second one with the
same flags fits if that share of what is free now is as much as the first one has::

    device  |= others =|= the first engine =|= not written =|======== free for a second ========|
                                                            |= usable (memory_ratio) =|= alone =|
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from minisgl.utils.text import size_of


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's device. needed: of the weights, the cache and the activations of the engine
    that runs. free: what no process has, without what this engine has not written yet. usable: the
    part of it that a second engine would take."""

    needed: int
    free: int
    usable: int

    @property
    def holds_two(self) -> bool:
        return self.usable >= self.needed

    def __str__(self) -> str:
        which = "both engines run for a while" if self.holds_two else "one engine at a time"
        return (
            f"an engine takes {size_of(self.needed)} of memory, and {size_of(self.free)} are free, "
            f"of which {size_of(self.usable)} may be used: {which}"
        )


def tightest(frames: Iterable[bytes]) -> EngineMemory:
    """Return the memory of the rank that has the least for a second engine. frames: of all ranks,
    as JSON."""
    ranks = (msgspec.json.decode(frame, type=EngineMemory) for frame in frames)
    return min(ranks, key=lambda rank: rank.usable - rank.needed)
