"""The parts of an answer, and a whole answer made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["content", "reasoning", "call", "arguments"]
Part = tuple[Kind, str]
"""call: a tool call begins, and the text is the function's name. arguments: the next piece of the
last call's arguments, which are JSON. Consecutive parts of one other kind are pieces of one
text."""


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """arguments: JSON as the model wrote it. Mutable: `collect` appends to it."""

    name: str
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class SplitAnswer:
    """Mutable: `collect` fills it."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a chat has beside text. reads_images: the model has a vision tower that is used.

    has_reasoning: a place for reasoning. has_switch: a request can switch reasoning on and off.
    """

    has_reasoning: bool = False
    has_switch: bool = False
    reads_images: bool = False


def collect(parts: Iterable[Part]) -> SplitAnswer:
    """Return the answer whose parts these are, in order."""
    answer = SplitAnswer()
    for kind, text in parts:
        if kind == "content":
            answer.content += text
        elif kind == "reasoning":
            answer.reasoning += text
        elif kind == "call":
            answer.calls.append(ToolCall(name=text))
        else:
            answer.calls[-1].arguments += text
    return answer
