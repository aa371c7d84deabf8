"""Leaves out of a request what this server or its model has no place for, with a warning.

Agents send some fields and blocks for every model: their vendor's search of the web, an effort, an
earlier turn's encrypted reasoning. To refuse these would end the agent's session, and its user
could not change it. A header of the answer names each omission, and the log each kind once. A
field that only a user sets is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from minisgl.server.api.chat import ChatRequest
from minisgl.tokenizer.parse.formats import HARMONY, detect_calls, detect_reasoning, detect_switch
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

EFFORT: Final = "reasoning_effort"
BUDGET: Final = "thinking_budget"
UNREADABLE: Final = "[an image or a file, which this model cannot read]"
"""Takes the place of an image or a file that a tool returned."""


class Omission(NamedTuple):
    """path: in the request. kind: one of a few words, which no client chooses."""

    path: str
    kind: str

    def __str__(self) -> str:
        return self.path if self.path.endswith(self.kind) else f"{self.path} ({self.kind})"


class OmissionLog:
    """Logs each kind of omission once. Mutable: it keeps the kinds that it has logged."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def warning(self, left_out: Sequence[Omission]) -> str:
        """Return the text of the answer's header, or "" without omissions. Logs new kinds."""
        new = {each.kind for each in left_out} - self._named
        if new:
            self._named |= new
            logger.warning(
                "left out of requests, because this server or this model has no place for it: %s; "
                "the log says so once",
                ", ".join(sorted(new)),
            )
        shown = [str(each) for each in left_out[:MAX_SHOWN]]
        if len(left_out) > MAX_SHOWN:
            shown.append(f"{len(left_out) - MAX_SHOWN} more")
        return f"left out: {', '.join(shown)}" if shown else ""


MAX_SHOWN: Final = 20  # a header of a few hundred bytes


def fitting(
    chat: ChatRequest, template: str, names: Mapping[str, str], default_effort: str = ""
) -> tuple[ChatRequest, list[Omission]]:
    """Return the request without the settings of reasoning that the template has no place for, and
    the omissions.

    names: the request's names of `EFFORT` and `BUDGET`. default_effort: an effort that is left out
    without a warning.
    """
    left_out: list[Omission] = []
    has_efforts = EFFORT in template or bool(detect_switch(template))
    if chat.reasoning_effort is not None and not has_efforts:
        if chat.reasoning_effort != default_effort:
            left_out.append(Omission(names[EFFORT], names[EFFORT]))
        chat = msgspec.structs.replace(chat, reasoning_effort=None)
    reasons = bool(detect_reasoning(template)) or detect_calls(template) == HARMONY
    if chat.thinking_budget is not None and not reasons:
        left_out.append(Omission(names[BUDGET], names[BUDGET]))
        chat = msgspec.structs.replace(chat, thinking_budget=None)
    return chat, left_out
