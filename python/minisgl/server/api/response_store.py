"""The answers that `previous_response_id` may name: in memory, the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from minisgl.errors import InvalidRequest, brief
from minisgl.server.api.messages import Message

MAX_BYTES: Final = 64 * 2**20
"""JSON of all conversations together: some thousands of agents' turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """messages: the conversation up to and with the answer, without `instructions`.

    owner: the name of the API key that asked, or "". answer: as it was sent.
    """

    owner: str
    messages: list[Message]
    answer: msgspec.Struct
    num_bytes: int


class ResponseStore:
    """Mutable: answers by id, the one used longest ago first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._num_bytes = 0

    def put(self, id: str, owner: str, messages: list[Message], answer: msgspec.Struct) -> None:
        """Keep an answer; one that is larger than the store is not kept."""
        num_bytes = len(msgspec.json.encode([messages, answer]))
        if num_bytes > self._max_bytes:
            return
        self._kept[id] = Kept(owner=owner, messages=messages, answer=answer, num_bytes=num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, id: str, owner: str, *, param: str | None = None, status: int = 404) -> Kept:
        """Raises InvalidRequest with `status` if there is none, or it is another key's."""
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            error: Any = InvalidRequest(
                f"there is no response {brief(id)}: it was not stored, or it had to make room for "
                "newer ones; send the whole conversation as input",
                param=param,
            )
            error.code, error.status = "previous_response_not_found", status
            raise error
        self._kept.move_to_end(id)
        return kept

    def delete(self, id: str, owner: str) -> None:
        """Raises as `get`."""
        self._num_bytes -= self.get(id, owner).num_bytes
        del self._kept[id]
