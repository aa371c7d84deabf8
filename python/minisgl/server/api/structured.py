"""The fields that set the form of an answer, and other servers' names of our fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from minisgl.core.sampling import KINDS
from minisgl.errors import InvalidRequest
from minisgl.server.strict import Json, field_error, ignored, only


class JsonSchema(Json, frozen=True, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: Annotated[bool | None, ignored("Changes nothing: the schema is followed.")] = None


class ResponseFormat(Json, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: Annotated[
        dict[str, Any] | bool | None,
        Meta(description="The same as json_schema.schema; other servers' name."),
    ] = None


class StructuredOutputs(Json, frozen=True, kw_only=True):
    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredFields(Json, frozen=True, kw_only=True):
    """The fields of the form. A request has at most one form."""

    response_format: Annotated[
        ResponseFormat | None, Meta(description="The form of the answer's text.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="The form of the answer's text, one of five.")
    ] = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Annotated[
        dict[str, Any] | bool | str | None,
        Meta(description="The same as guided_json, llama.cpp's name."),
    ] = None
    grammar: Annotated[str | None, Meta(description="guided_grammar, llama.cpp's name.")] = None
    regex: Annotated[str | None, Meta(description="guided_regex, SGLang's name.")] = None
    ebnf: Annotated[str | None, Meta(description="guided_grammar, SGLang's name.")] = None
    guided_decoding_backend: Annotated[
        str | None, only("auto", "guidance", why="there is one, llguidance")
    ] = None
    guided_whitespace_pattern: Annotated[str | None, only(why="write it into a regex")] = None

    def structured(self) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Return the value of `SamplingParams.structured_outputs`, or None, and the request's names
        of its fields, by their names there.

        Raises InvalidRequest if the request has two forms that differ, or one without its value.
        """
        found: list[tuple[dict[str, Any], dict[str, str]]] = []
        if self.response_format is not None and self.response_format.type != "text":
            found.append(_of_response_format(self.response_format))
        if (form := self.structured_outputs) is not None:
            option = {kind: value for kind in KINDS if (value := getattr(form, kind)) is not None}
            found.append((option, {}))
        for name, kind in _FORMS.items():
            if (value := getattr(self, name)) is not None:
                found.append(({kind: value}, {f"{_OPTION}.{kind}": name, _OPTION: name}))
        if any(option != found[0][0] for option, _ in found):
            given = [names.get(_OPTION, _OPTION) for _, names in found]
            wrong = f"give {' or '.join(given)}: an answer has one form"
            raise InvalidRequest(wrong, param=given[0])
        return found[0] if found else (None, {})


_OPTION: Final = "structured_outputs"
_SCHEMA: Final = "response_format.json_schema.schema"
_FORMS: Final = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")} | {
    "json_schema": "json", "regex": "regex", "grammar": "grammar", "ebnf": "grammar"
}  # fmt: skip
"""The entries of `structured_outputs`, by the fields that mean the same."""


def _of_response_format(wanted: ResponseFormat) -> tuple[dict[str, Any], dict[str, str]]:
    if wanted.schema is not None:
        if wanted.json_schema is not None:
            raise InvalidRequest(
                "give one of response_format.schema and response_format.json_schema",
                param="response_format.schema",
            )
        names = {f"{_OPTION}.json": "response_format.schema", _OPTION: "response_format"}
        return {"json": wanted.schema}, names
    if wanted.type == "json_object":
        return {"json_object": True}, {_OPTION: "response_format"}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        param = "response_format.json_schema" + (".schema" if wanted.json_schema else "")
        raise InvalidRequest(f"the field {param} is missing", param=param)
    names = {f"{_OPTION}.json": _SCHEMA, _OPTION: "response_format"}
    return {"json": wanted.json_schema.schema}, names


R = TypeVar("R", bound=Json)


class Alias(NamedTuple):
    """A name of the field `ours`. kind: of the values that it takes. form: makes our value of one;
    None counts as left out."""

    theirs: str
    ours: str
    kind: type = object
    form: Callable[[Any], Any] = lambda value: value


ALIASES: Final = (
    Alias("max_completion_tokens", "max_tokens"),
    Alias("n_predict", "max_tokens", form=lambda value: None if value == -1 else value),
    Alias("repeat_penalty", "repetition_penalty"),
    Alias("prompt", "text", str),
    Alias("prompt", "input_ids", list),
    Alias("prompt", "messages", str, lambda text: [{"role": "user", "content": text}]),
)
"""A request for an answer has `theirs` as a field. The first entry counts whose `ours` it has, too,
and whose kind the value is.

Sources of the names: llama.cpp's tools/server/README.md, SGLang's page on structured outputs, the
clients of the original mini-sglang.
"""


def alias_names(asked: Json) -> dict[str, str]:
    """Return the aliases that the request has, by our names of the fields."""
    return {alias.ours: alias.theirs for alias in _aliases(asked)}


def renamed(asked: R) -> R:
    """Return the request with our fields beside its aliases.

    Raises InvalidRequest if a field and its alias differ, or if the field cannot have the value.
    """
    fields = _types(type(asked))
    changed: dict[str, Any] = {}
    for theirs, ours, _, form in _aliases(asked):
        try:
            value = msgspec.convert(form(getattr(asked, theirs)), fields[ours])
        except msgspec.ValidationError as error:
            raise field_error(str(error), fields[ours], theirs) from None
        given = changed.get(ours, getattr(asked, ours))
        if given not in (None, [], value):  # a chat without messages has an empty list
            raise InvalidRequest(
                f"{theirs} and {ours} mean the same and differ: give one of them", param=theirs
            )
        changed[ours] = value if value is not None else given
    return msgspec.structs.replace(asked, **changed) if changed else asked


def _aliases(asked: Json) -> list[Alias]:
    """Return the rows of `ALIASES` that the request uses, the first one of each name."""
    fields = _types(type(asked))
    found = {  # in turn, so that the first entry of each name stays
        alias.theirs: alias
        for alias in reversed(ALIASES)
        if {alias.theirs, alias.ours} <= fields.keys()
        and isinstance(getattr(asked, alias.theirs), alias.kind)
        and getattr(asked, alias.theirs) is not None
    }
    return list(found.values())


@cache
def _types(record: type[Json]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(record)}
