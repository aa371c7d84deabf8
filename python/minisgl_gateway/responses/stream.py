"""Writes the answer of POST /v1/responses, whole or as a stream of events."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec
from msgspec import UNSET

from minisgl.core.answer import Kind, Part
from minisgl.server.api.answers import TokenLogprob
from minisgl.server.api.messages import new_call_id
from minisgl.server.web.errors import ErrorBody
from minisgl_gateway.chat import End, Form, named_event
from minisgl_gateway.responses.answer import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomCall,
    CustomInputDelta,
    CustomInputDone,
    FunctionCall,
    Incomplete,
    ItemAdded,
    ItemDone,
    ItemStatus,
    NumberedEvent,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseUsage,
)
from minisgl_gateway.responses.tools import OfferedTools, custom_input


class ResponseForm(Form):
    """Writes the answer. A whole answer is made as a stream whose events are dropped.

    Mutable: it has the items so far, the pieces and log-probabilities of the open item, and the
    number of the next event. The open item is empty in the list until it is complete.
    """

    def __init__(
        self,
        begun: ResponseObject,
        keep: Callable[[ResponseObject], None],
        offered: OfferedTools,
    ) -> None:
        """keep: called with the answer when it is complete."""
        self._offered = offered
        self._begun = begun
        self._keep = keep
        self._items: list[OutputItem] = []
        self._is_open = False
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_events = 0

    def whole(
        self, parts: Sequence[Part], logprobs: list[TokenLogprob], end: End
    ) -> ResponseObject:
        if len(logprobs) == end.usage.completion_tokens:  # of all tokens, reasoning comes first
            logprobs = logprobs[end.num_reasoning :]
        if any(kind == "call" for kind, _ in parts):  # their tokens follow the text's
            text = "".join(text for kind, text in parts if kind == "content").encode()
            size = b"".join(bytes(each.bytes) for each in logprobs).find(text) + len(text)
            ends = accumulate(len(each.bytes) for each in logprobs)
            logprobs = logprobs[: sum(end < size for end in ends) + bool(text)]
        self.text(parts, logprobs)
        return self._ended(end)[0]

    def opening(self, num_prompt_tokens: int) -> bytes:
        created = self._event(ResponseCreated, response=self._begun)
        return created + self._event(ResponseInProgress, response=self._begun)

    def end(self, end: End) -> bytes:
        answer, events = self._ended(end)
        kind = ResponseIncomplete if end.is_cut else ResponseCompleted
        return events + self._event(kind, response=answer)

    def _ended(self, end: End) -> tuple[ResponseObject, bytes]:
        """Complete the answer, and keep it. Returns it, and the events of its last item."""
        status: ItemStatus = "incomplete" if end.is_cut else "completed"
        events = b"" if self._items else self._begin("content", "")
        events += self._close(status)
        answer = msgspec.structs.replace(
            self._begun,
            status=status,
            output=self._items,
            incomplete_details=Incomplete() if end.is_cut else None,
            usage=ResponseUsage.of(end),
            timings=end.timings,
        )
        self._keep(answer)
        return answer, events

    def failure(self, error: ErrorBody) -> bytes:
        failed = ResponseFailure(code=error.error.code, message=error.error.message)
        answer = msgspec.structs.replace(self._begun, status="failed", error=failed)
        return self._event(ResponseFailed, response=answer)

    def text(self, parts: Sequence[Part], logprobs: list[TokenLogprob]) -> bytes:
        """Append parts to the items. The first part with content gets `logprobs`; without parts,
        the message does whose text has just ended, or that of an answer without text."""
        events = []
        is_of_text = not self._items or isinstance(self._items[-1], OutputMessage)
        for kind, text in parts or ([("content", "")] if logprobs and is_of_text else []):
            item = self._items[-1] if self._is_open else None
            if kind == "call" or not isinstance(item, _ITEMS[kind]):
                events.append(self._begin(kind, text))
            if kind == "call":
                continue
            self._pieces.append(text)
            if kind == "content":
                self._logprobs += logprobs
                events.append(self._of_item(OutputTextDelta, delta=text, logprobs=logprobs))
                logprobs = []
            elif not isinstance(self._items[-1], CustomCall):  # its input is known at the end
                delta = ReasoningDelta if kind == "reasoning" else ArgumentsDelta
                events.append(self._of_item(delta, delta=text))
        return b"".join(events)

    def _begin(self, kind: Kind, text: str) -> bytes:
        """Complete the open item and begin another. text: of a call, the function's name."""
        events = self._close("completed")
        number = uuid.uuid4().hex
        item: OutputItem
        part: OutputText | ReasoningText | None = None
        if kind == "call":
            item = self._call(text, number)
        elif kind == "reasoning":
            part = ReasoningText(text="")
            item = ReasoningItem(id=f"rs_{number}", content=[part], status="in_progress")
        else:
            part = OutputText(text="")
            item = OutputMessage(id=f"msg_{number}", content=[part], status="in_progress")
        self._items.append(item)
        self._is_open = True
        shown = msgspec.structs.replace(item, content=[]) if part else item
        events += self._event(ItemAdded, item=shown, output_index=self._index)
        return events + (self._of_item(PartAdded, part=part) if part else b"")

    def _call(self, name: str, number: str) -> FunctionCall | CustomCall:
        """Return an empty call of the function with this name in the chat."""
        namespace, own_name = self._offered.namespaces.get(name, (UNSET, name))
        fields: dict[str, Any] = {"name": own_name, "namespace": namespace}
        fields |= {"call_id": new_call_id(), "status": "in_progress"}
        if name in self._offered.custom:
            return CustomCall(id=f"ctc_{number}", input="", **fields)
        return FunctionCall(id=f"fc_{number}", arguments="", **fields)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _close(self, status: ItemStatus) -> bytes:
        """Complete the open item, if there is one. Returns the events."""
        if not self._is_open:
            return b""
        item, text = self._items[-1], "".join(self._pieces)
        part: OutputText | ReasoningText | None = None
        if isinstance(item, FunctionCall):
            item = msgspec.structs.replace(item, arguments=text, status=status)
            events = self._of_item(ArgumentsDone, arguments=text, name=item.name)
        elif isinstance(item, CustomCall):
            text = custom_input(text)
            item = msgspec.structs.replace(item, input=text, status=status)
            events = self._of_item(CustomInputDelta, delta=text)
            events += self._of_item(CustomInputDone, input=text)
        elif isinstance(item, ReasoningItem):
            part = ReasoningText(text=text)
            events = self._of_item(ReasoningDone, text=text)
        else:
            part = OutputText(text=text, logprobs=self._logprobs)
            events = self._of_item(OutputTextDone, text=text, logprobs=self._logprobs)
        if part:
            item = msgspec.structs.replace(item, content=[part], status=status)
            events += self._of_item(PartDone, part=part)
        self._items[-1] = item
        self._is_open = False
        self._pieces, self._logprobs = [], []
        return events + self._event(ItemDone, item=item, output_index=self._index)

    def _of_item(self, kind: type[NumberedEvent], **fields: Any) -> bytes:
        id = self._items[-1].id
        return self._event(kind, item_id=id, output_index=self._index, **fields)

    def _event(self, kind: type[NumberedEvent], **fields: Any) -> bytes:
        numbered = kind(sequence_number=self._num_events, **fields)
        self._num_events += 1
        return named_event(str(kind.__struct_config__.tag), numbered)


_ITEMS: Final[dict[Kind, tuple[type[OutputItem], ...]]] = {
    "content": (OutputMessage,),
    "reasoning": (ReasoningItem,),
    "arguments": (FunctionCall, CustomCall),
}
