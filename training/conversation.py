"""The record that all modules here exchange: a conversation with its expected answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages that end with the assistant; task names the row of the accuracy table.

    raw: written as plain text, question, newline, answer, for use without the chat template.
    """

    task: str
    messages: tuple[Message, ...]
    raw: bool = False

    @property
    def prompt(self) -> tuple[Message, ...]:
        """All but the last answer."""
        return self.messages[:-1]

    @property
    def expected(self) -> str:
        """The last answer."""
        return self.messages[-1].content


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question with its answer, before a system prompt or a history is put around it.

    brief: the answer under "be brief", if the task has one.
    word, number: what "it" and "that" mean in a following question.
    """

    task: str
    user: str
    answer: str
    brief: str | None = None
    word: str | None = None
    number: int | None = None
