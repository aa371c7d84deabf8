"""Other servers' names of our fields, as fields of a request that become ours when it is read.

Sources of the names: llama.cpp's tools/server/README.md, the clients of the original mini-sglang.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from minisgl.errors import InvalidRequest
from minisgl.server.strict import Json, field_error

R = TypeVar("R", bound=Json)


class Alias(NamedTuple):
    """A name of the field `ours`. kind: of the values that it takes. form: makes our value of one;
    None counts as left out."""

    theirs: str
    ours: str
    kind: type = object
    form: Callable[[Any], Any] = lambda value: value


ALIASES: Final = (
    Alias("n_predict", "max_tokens", form=lambda value: None if value == -1 else value),
    Alias("repeat_penalty", "repetition_penalty"),
    Alias("json_schema", "guided_json"),
    Alias("grammar", "guided_grammar"),
    Alias("prompt", "text", str),
    Alias("prompt", "input_ids", list),
    Alias("prompt", "messages", str, lambda text: [{"role": "user", "content": text}]),
)
"""A request for an answer has `theirs` as a field. The first entry counts whose `ours` it has, too,
and whose kind the value is."""


def renamed(asked: R) -> R:
    """Return the request with our fields instead of aliases.

    Raises InvalidRequest if a field and its alias differ, or if the field cannot have the value.
    """
    fields = _types(type(asked))
    changed: dict[str, Any] = {}
    for theirs, ours, kind, form in ALIASES:
        value = getattr(asked, theirs, None)
        if value is None or theirs in changed or not {theirs, ours} <= fields.keys():
            continue
        if not isinstance(value, kind):
            continue
        try:
            value = msgspec.convert(form(value), fields[ours])
        except msgspec.ValidationError as error:
            raise field_error(str(error), fields[ours], theirs) from None
        changed[theirs] = None
        given = getattr(asked, ours)
        if given not in (None, [], value):  # a chat without messages has an empty list
            raise InvalidRequest(
                f"{theirs} and {ours} mean the same and differ: give one of them", param=theirs
            )
        changed[ours] = value if value is not None else given
    return msgspec.structs.replace(asked, **changed) if changed else asked


@cache
def _types(record: type[Json]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(record)}
