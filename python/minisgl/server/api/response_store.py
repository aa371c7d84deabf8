"""The answers that `previous_response_id` and `item_reference` may name: in memory, the oldest go
first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from minisgl.errors import InvalidRequest, brief
from minisgl.server.api.messages import Message
from minisgl.server.api.responses_answer import OutputItem

MAX_BYTES: Final = 64 * 2**20
"""JSON of all conversations together: some thousands of agents' turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """messages: the conversation up to and with the answer, without `instructions`.

    owner: the name of the API key that asked, or "". answer: as it was sent. items: those of it.
    """

    owner: str
    messages: list[Message]
    answer: msgspec.Struct
    items: Sequence[OutputItem]
    num_bytes: int


class ResponseStore:
    """Mutable: answers by id, the one used longest ago first, and where each item is."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._answer_of: dict[str, str] = {}  # by the item's id
        self._num_bytes = 0

    def put(
        self,
        id: str,
        owner: str,
        messages: list[Message],
        answer: msgspec.Struct,
        items: Sequence[OutputItem] = (),
    ) -> None:
        """Keep an answer; one that is larger than the store is not kept."""
        num_bytes = len(msgspec.json.encode([messages, answer]))
        if num_bytes > self._max_bytes:
            return
        self._kept[id] = Kept(
            owner=owner, messages=messages, answer=answer, items=items, num_bytes=num_bytes
        )
        self._answer_of |= {item.id: id for item in items}
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

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
        self.get(id, owner)
        self._drop(id)

    def item(self, id: str, owner: str, param: str) -> OutputItem:
        """An item of an answer. Raises InvalidRequest if there is none, or it is another key's."""
        kept = self._kept.get(self._answer_of.get(id, ""))
        if kept is None or kept.owner != owner:
            raise InvalidRequest(
                f"{param}: there is no item {brief(id)}: its answer was not stored, or it had to "
                "make room for newer ones; send the item itself",
                param=param,
            )
        return next(item for item in kept.items if item.id == id)

    def _drop(self, id: str) -> None:
        kept = self._kept.pop(id)
        self._num_bytes -= kept.num_bytes
        for item in kept.items:
            self._answer_of.pop(item.id, None)
