"""What was used lately, up to a bound of its size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, Generic, TypeVar

KEPT_BYTES: Final = 2**26
"""Of the pixels of pictures, and of files of the web. A client sends those of a conversation again
with each turn, and a router asks for a prompt's ids before it passes the prompt on."""

Value = TypeVar("Value")


class Lately(Generic[Value]):
    """Values by key; the one that was used the longest ago leaves first. Threads may share it.

    Mutable. most: the sum of all sizes.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._found: OrderedDict[object, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: object) -> Value | None:
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key][0]

    def put(self, key: object, value: Value, size: int) -> None:
        with self._lock:
            _, old = self._found.pop(key, (None, 0))
            self._found[key] = value, size
            self._size += size - old
            while self._size > self._most:
                _, (_, size) = self._found.popitem(last=False)
                self._size -= size
