"""The adapters on the device, as the scheduler sees them: N slots, the least recently used first.

A request holds its adapter's slot from its start until its last step is committed. It waits while
other adapters' requests hold all slots. While it waits, no later request with an adapter starts, so
it waits for requests that run already, at most; requests without an adapter need no slot. A slot is
filled before the step in which its request starts, in stream order: earlier steps have read it.
"""

from __future__ import annotations

from minisgl.core.adapters import Adapter, AdapterLoad


class Slots:
    """Mutable. Slot 0 stands for no adapter; the others count from 1."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._held: dict[str, int] = {}  # digest -> slot, the least recently used first
        self._users: dict[str, int] = {}  # digest -> running requests

    def has_room(self, adapter: Adapter) -> bool:
        """Return whether a request of the adapter can start."""
        idle = len(self._held) - len(self._users)
        return adapter.digest in self._held or bool(self._free) or idle > 0

    def take(self, adapter: Adapter, loads: list[AdapterLoad]) -> int:
        """Return the slot for a request that starts. Appends the adapter to `loads` if the slot
        must be filled. Requires `has_room`."""
        digest = adapter.digest
        slot = self._held.pop(digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
            loads.append(AdapterLoad(slot, adapter))
        self._held[digest] = slot
        self._users[digest] = self._users.get(digest, 0) + 1
        return slot

    def _evict(self) -> int:
        digest = next(digest for digest in self._held if digest not in self._users)
        return self._held.pop(digest)

    def leave(self, adapter: Adapter) -> None:
        """A running request of the adapter has left."""
        self._users[adapter.digest] -= 1
        if not self._users[adapter.digest]:
            del self._users[adapter.digest]

    def clear(self) -> None:
        """Forget what the slots have, after a failed step. No request may run."""
        assert not self._users, f"{self._users} still run"
        self._free += self._held.values()
        self._held.clear()
