"""Finds a checkpoint's formats in its chat template, which writes earlier calls and reasoning as
the model does."""

from __future__ import annotations

import re
from functools import lru_cache

from minisgl.core.answer import Abilities
from minisgl_zoo.calls.formats import CallFormat, MessageFormat
from minisgl_zoo.calls.known import CALLS, MESSAGES, REASONING


@lru_cache(4)
def detect_calls(template: str) -> str:
    """Return the name of the call format of a chat template, "" if it has none that is known."""
    formats: dict[str, MessageFormat | CallFormat] = {**MESSAGES, **CALLS}
    found = (name for name, form in formats.items() if all(t in template for t in form.detected_by))
    return next(found, "")


@lru_cache(4)
def detect_reasoning(template: str) -> str:
    """Return the name of the reasoning format of a chat template, "" if it has none."""
    return next((name for name, (_, end) in REASONING.items() if end in template), "")


@lru_cache(4)
def detect_switch(template: str) -> str:
    """Return the variable of a chat template that switches reasoning on and off, "" for none."""
    if "enable_thinking" in template:
        return "enable_thinking"
    statements = " ".join(re.findall(r"\{%.*?%\}", template, re.DOTALL))
    code = re.sub(r"'[^']*'|\"[^\"]*\"", "", statements)
    return "thinking" if re.search(r"(?<![\w.])thinking(?!\w)", code) else ""


def abilities(template: str) -> Abilities:
    """Return what a chat template has beside text."""
    return Abilities(
        has_reasoning=bool(detect_reasoning(template)) or detect_calls(template) in MESSAGES,
        has_switch=bool(detect_switch(template)),
    )
