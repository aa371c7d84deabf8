"""The formats by name, and those of a checkpoint: its chat template writes earlier calls and
reasoning as the model does. `--tool-call-parser` has the names of `CALLS` and `MESSAGES`."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from minisgl.core.answer import Abilities
from minisgl.plugins import rows
from minisgl_zoo.calls.formats import CallFormat, MessageFormat

_FORMATS: Final = [(row.name, row.load()) for row in rows("chat_formats")]
CALLS: Final[dict[str, CallFormat]] = {
    name: form for name, form in _FORMATS if isinstance(form, CallFormat)
}
"""If a template has the texts of several formats, the first one counts."""
MESSAGES: Final[dict[str, MessageFormat]] = {
    name: form for name, form in _FORMATS if isinstance(form, MessageFormat)
}
"""For calls and reasoning. They go before `CALLS`."""
REASONING: Final[dict[str, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""Name -> (the text before reasoning, the text behind it)."""
PARSERS: Final = (*CALLS, *MESSAGES)
_TOKEN: Final = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")


def message_format(*names: str) -> MessageFormat | None:
    """Return the first format of `MESSAGES` among `names`."""
    return next((MESSAGES[name] for name in names if name in MESSAGES), None)


def special_texts(calls: str, reasoning: str) -> tuple[str, ...]:
    """Return the texts of these formats ("" for none) that may be special tokens."""
    if form := message_format(calls, reasoning):
        inside = form.calls.texts if form.calls else ()
        return form.markers + tuple(token for text in inside for token in _TOKEN.findall(text))
    texts = [
        *(CALLS[calls].texts if calls else ()),
        *(REASONING[reasoning] if reasoning else ()),
    ]
    return tuple(token for text in texts for token in _TOKEN.findall(text))


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
