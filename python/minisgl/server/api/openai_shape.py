"""What the answers of chat completions and of text completions have in common."""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from minisgl.core import Finished
from minisgl.message import TextReply, ids_from_bytes
from minisgl.server.api.schema import OpenAIFields, Timings, Usage
from minisgl.server.web.respond import DONE, Output, Shape, event


class OpenAIShape(Shape):
    """A `Shape` whose answers have an id, a time and a model. Mutable: it may count tokens.

    chunk_type: the record of an event.
    """

    chunk_type: ClassVar[type[Struct]]

    def __init__(self, prefix: str, model: str, asked: OpenAIFields, *, has_logprobs: bool) -> None:
        """prefix: of the id. has_logprobs: report each token's log-probability."""
        created = int(time.time())
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "created": created, "model": model
        }  # fmt: skip
        self._num_choices = asked.n or 1
        self._include_usage = asked.include_usage
        self._running = asked.running_usage()
        self._has_logprobs = has_logprobs
        self._has_ids = self.returns_ids = bool(asked.return_token_ids)
        self._shown: set[int] = set()

    def opening(self, num_prompt_tokens: int) -> bytes:
        if self._running:
            self._running.begin(num_prompt_tokens)
        return b""

    def closing(self, ends: list[Finished]) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self.chunk_type(**self._head, choices=[], **self._totals(ends))) + DONE

    @property
    def _has_details(self) -> bool:
        """Whether each chunk has more than text."""
        return self._has_logprobs or self._has_ids or self._running is not None

    @property
    def _usage_so_far(self) -> Usage | UnsetType | None:
        """`usage` of a chunk that is not the last."""
        if self._running:
            return self._running.usage
        return None if self._include_usage else UNSET

    def _count(self, reply: TextReply) -> None:
        if self._running:
            self._running.add(len(reply.token_ids))

    def _ids(self, output: Output | TextReply | None) -> list[int] | UnsetType:
        return output.token_ids if output and self._has_ids else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        """Return the ids of prompt `index`, the first time."""
        if index in self._shown or index not in self.prompt_ids or not self._has_ids:
            return UNSET
        self._shown.add(index)
        ids: list[int] = ids_from_bytes(self.prompt_ids[index]).tolist()
        return ids

    def _totals(self, ends: list[Finished]) -> dict[str, Any]:
        return {"usage": Usage.of(ends, self._num_choices), "timings": Timings.of(ends)}
