"""Keeps the answers of POST /v1/responses in memory, because later requests refer to them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from minisgl.errors import InvalidRequest
from minisgl.server.api.messages import Message
from minisgl.utils.text import brief
from minisgl_gateway.responses.answer import OutputItem, ResponseObject

MAX_BYTES: Final = 64 * 2**20
"""The most bytes of JSON of all kept conversations: thousands of agents' turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An answer with its conversation.

    owner: the name of the request's API key, or "". messages: the conversation up to the answer,
    without `instructions`. answer: as it was sent. num_bytes: of the JSON.
    """

    owner: str
    messages: list[Message]
    answer: ResponseObject
    num_bytes: int


class ResponseStore:
    """Answers by id. Mutable. When they exceed `max_bytes`, the owner with the most bytes loses the
    answer that it used longest ago. So no key pushes out what another one keeps in its share."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, Kept] = {}
        self._used: dict[str, OrderedDict[str, None]] = {}  # ids by owner, the latest used last
        self._answer_of: dict[str, str] = {}  # by the item's id
        self._num_bytes: Counter[str] = Counter()  # by owner

    def put(self, owner: str, messages: list[Message], answer: ResponseObject) -> None:
        """Keep an answer, unless it is larger than the store."""
        num_bytes = len(msgspec.json.encode([messages, answer]))
        if num_bytes > self._max_bytes:
            return
        self._kept[answer.id] = Kept(
            owner=owner, messages=messages, answer=answer, num_bytes=num_bytes
        )
        self._used.setdefault(owner, OrderedDict())[answer.id] = None
        self._answer_of |= {item.id: answer.id for item in answer.output}
        self._num_bytes[owner] += num_bytes
        while self._num_bytes.total() > self._max_bytes:
            ((largest, _),) = self._num_bytes.most_common(1)
            self._drop(next(iter(self._used[largest])))

    def get(self, id: str, owner: str, *, param: str | None = None, status: int = 404) -> Kept:
        """Return an answer. param: the field that names it.

        Raises InvalidRequest with `status` if it is not kept, or if another key owns it.
        """
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            error: Any = InvalidRequest(
                f"there is no response {brief(id)}: it was not stored, or newer ones took its "
                "place; send the whole conversation as input",
                param=param,
            )
            error.code, error.status = "previous_response_not_found", status
            raise error
        self._used[owner].move_to_end(id)
        return kept

    def delete(self, id: str, owner: str) -> None:
        """Drop an answer. Raises InvalidRequest as `get` does."""
        self.get(id, owner)
        self._drop(id)

    def item(self, id: str, owner: str, param: str) -> OutputItem:
        """Return an item of an answer. param: the field that names it.

        Raises InvalidRequest if the answer is not kept, or if another key owns it.
        """
        kept = self._kept.get(self._answer_of.get(id, ""))
        if kept is None or kept.owner != owner:
            raise InvalidRequest(
                f"{param}: there is no item {brief(id)}: its answer was not stored, or newer ones "
                "took its place; send the item itself",
                param=param,
            )
        return next(item for item in kept.answer.output if item.id == id)

    def _drop(self, id: str) -> None:
        kept = self._kept.pop(id)
        del self._used[kept.owner][id]
        self._num_bytes[kept.owner] -= kept.num_bytes
        if not self._used[kept.owner]:
            del self._used[kept.owner], self._num_bytes[kept.owner]
        for item in kept.answer.output:
            self._answer_of.pop(item.id, None)
