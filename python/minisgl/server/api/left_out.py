"""Leaves out, with a warning, the parts of a request that this server or its model cannot use.

Agents send some fields and blocks to every model: their vendor's web search, an effort, encrypted
reasoning of an earlier turn. A refusal would end the agent's session, and the user could not change
that. A header of the answer names each omission; the log names each kind once. A field that only a
user sets is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from minisgl.core.answer import Abilities
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


class Omission(NamedTuple):
    """A part that is left out. path: in the request. kind: one of a few fixed words."""

    path: str
    kind: str

    def __str__(self) -> str:
        return self.path if self.path.endswith(self.kind) else f"{self.path} ({self.kind})"


class OmissionLog:
    """Logs each kind of omission once. Mutable: it keeps the kinds that it has logged."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def warning(self, left_out: Sequence[Omission]) -> str:
        """Return the text of the answer's header; "" without omissions. Logs new kinds."""
        new = {each.kind for each in left_out} - self._named
        if new:
            self._named |= new
            logger.warning(
                "left out of requests, because this server or this model cannot use it: %s; this "
                "is logged once",
                ", ".join(sorted(new)),
            )
        shown = [str(each) for each in left_out[:MAX_SHOWN]]
        if len(left_out) > MAX_SHOWN:
            shown.append(f"{len(left_out) - MAX_SHOWN} more")
        return f"left out: {', '.join(shown)}" if shown else ""


MAX_SHOWN: Final = 20  # a header of a few hundred bytes


def unused_switch(args: Mapping[str, Any], abilities: Abilities) -> list[Omission]:
    """Return an omission if `enable_thinking` asks for what the model does not do and the chat
    template has no switch. args: the template's variables."""
    wanted = args.get("enable_thinking")
    if wanted is None or abilities.has_switch or wanted == abilities.has_reasoning:
        return []
    return [Omission("enable_thinking", "enable_thinking")]
