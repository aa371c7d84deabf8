"""Turns a checkpoint's description of its answers into formats that our parser reads.

The description is `response_template` in tokenizer_config.json (transformers 5.23,
`utils/chat_parsing`). It has a field for each part of an answer, with the marks before and behind
the part as texts or regexes, and rules by which its text becomes a field of the message. Our parser
reads calls while they arrive, so it knows fewer kinds. Other descriptions are refused; the caller
then uses the formats of the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from minisgl_zoo.calls.formats import CallFormat
from minisgl_zoo.calls.known import CALLS, Calls

REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")


class UnknownResponseTemplate(ValueError):
    """Our parser cannot read the description. The message says which part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormats:
    """reasoning: the texts before and behind reasoning; None for none."""

    calls: Calls = ""
    reasoning: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A piece of a pattern: a text, a named group, or white space, which has neither field."""

    text: str = ""
    group: str = ""


def response_formats(template: Any) -> ResponseFormats:
    """Return the formats of a description. Raises UnknownResponseTemplate."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or not all(isinstance(f, Mapping) for f in fields.values()):
        raise UnknownResponseTemplate("it has no fields")
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    calls = fields.get("tool_calls")
    return ResponseFormats(
        calls=_known(_call_format(calls)) if calls else "",
        reasoning=_reasoning(reasoning) if reasoning else None,
    )


def _reasoning(field: Mapping[str, Any]) -> tuple[str, str]:
    marks = []
    for side in ("open", "close"):
        texts = [piece.text.strip() for piece in _pieces(field, side) if piece.text or piece.group]
        if len(texts) != 1 or not texts[0]:
            raise UnknownResponseTemplate(f"the {side} mark of its reasoning is not one text")
        marks += texts
    return marks[0], marks[1]


def _call_format(field: Mapping[str, Any]) -> CallFormat:
    opening, closing = _pieces(field, "open"), _pieces(field, "close")
    while opening and opening[0] == _Piece():
        opening = opening[1:]
    if not opening or not opening[0].text.strip():
        raise UnknownResponseTemplate("its tool_calls do not begin with a text")
    groups = [piece.group for piece in opening if piece.group]
    end = next((piece.text.strip() for piece in reversed(closing) if piece.text), "")
    args = field.get("content_args") or {}
    name, arguments, is_list = _places(field)
    content = field.get("content", "text")
    if not groups:
        if content != "json" or {*args} - {"allow_non_json"}:
            raise UnknownResponseTemplate(f"its tool_calls without a name are {content}, not json")
        return CallFormat(
            begin=_joined(opening),
            end=end,
            is_list=is_list,
            name_key=name.rpartition(".")[2],
            key=arguments.rpartition(".")[2],
        )
    if groups != [name] or arguments != "content":
        raise UnknownResponseTemplate("its tool_calls have other groups than the name")
    at = next(index for index, piece in enumerate(opening) if piece.group)
    behind = _joined(opening[at + 1 :])
    if content == "json" and (args.get("unquoted_keys") or args.get("string_delims")):
        return CallFormat(
            begin=_joined(opening[:at]), end=end, syntax="pairs", quote=_quote(args, behind)
        )
    begin, lead = opening[0].text.strip(), _joined(opening[1:at])
    named = partial(
        CallFormat, begin=begin, end=end, header=f"{begin}{lead}NAME{behind}", footer=end
    )
    if content == "json" and behind:
        name = rf"\s*{re.escape(lead)}(.*?)\s*"
        return named(syntax="named", name=name, separator=behind)
    if content == "xml-inline" and end:
        key, key_end, value_begin, value_end = _tags(str(args.get("tag_pattern", "")))
        return named(
            syntax="tags",
            name=rf"\s*{re.escape(lead)}(.*?)(?:{re.escape(behind)})?\s*",
            key=key,
            key_end=key_end,
            value_begin=value_begin,
            value_end=value_end,
            argument=f"{key}KEY{key_end}{value_begin}VALUE{value_end}",
        )
    raise UnknownResponseTemplate(f"its tool_calls with a name are {content}")


def _places(field: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Return the placeholders of the name and of the arguments, without braces, and whether the
    calls are in a list."""
    transform = field.get("transform") or "{content}"
    if isinstance(transform, Mapping):
        transform = transform.get("function", transform)
    if transform == "{content}":
        return "content.name", "content.arguments", False
    if not isinstance(transform, Mapping) or not {"name", "arguments"} <= {*transform}:
        raise UnknownResponseTemplate("its tool_calls are no functions with name and arguments")
    name, arguments = (str(transform[key]) for key in ("name", "arguments"))
    if not (_PLACE.fullmatch(name) and _PLACE.fullmatch(arguments)):
        raise UnknownResponseTemplate("its tool_calls have a name or arguments from elsewhere")
    return name.strip("{}"), arguments.strip("{}"), bool(field.get("transform_each"))


_PLACE: Final = re.compile(r"\{(\w+\.)?\w+\}")


def _quote(args: Mapping[str, Any], behind: str) -> str:
    """Return the mark before and behind each text in {key:value}."""
    [[quote, other], *more] = args.get("string_delims") or [["", ""]]
    if not args.get("unquoted_keys") or not quote or quote != other or more or behind:
        raise UnknownResponseTemplate("its tool_calls are another dialect of JSON")
    return str(quote)


def _tags(pattern: str) -> tuple[str, str, str, str]:
    """Return the texts before and behind an argument's name, and before and behind its value."""
    pieces = [piece for piece in _parsed(pattern) if piece != _Piece()]
    groups = [piece.group for piece in pieces]
    texts = [piece.text for piece in pieces]
    if groups == ["", "key", "", "value", ""]:
        return texts[0], texts[2], "", texts[4]
    if groups == ["", "key", "", "", "value", ""]:
        return texts[0], texts[2], texts[3], texts[5]
    raise UnknownResponseTemplate("the tag_pattern of its tool_calls is none that is known")


def _pieces(field: Mapping[str, Any], side: str) -> list[_Piece]:
    """Return the pieces of a field's mark, [] if it has none. side: "open" or "close"."""
    if (pattern := field.get(f"{side}_pattern")) is not None:
        return _parsed(str(pattern))
    text = field.get(side) or ""
    if isinstance(text, Sequence) and not isinstance(text, str):
        if len(text) != 1:
            raise UnknownResponseTemplate(f"a field has several texts for {side}")
        text = text[0]
    return [_Piece(text=text)] if text else []


def _joined(pieces: Sequence[_Piece]) -> str:
    return "".join(piece.text for piece in pieces).strip()


_STEP: Final = re.compile(
    r"(?P<space>\\s[*+?]?)|\\(?P<letter>[nrt])|\\(?P<escaped>\W)"
    r"|\(\?P<(?P<group>\w+)>(?:\[(?:\\.|[^\]])*\]|\\.|[^()\\\[])*\)"
    r"|(?P<plain>[^\\.^$*+?()\[\]|])",
    re.DOTALL,
)
"""A step of a regex: spaces, a character, or a named group without groups in it."""


def _parsed(pattern: str) -> list[_Piece]:
    """Return the pieces of a regex. Raises UnknownResponseTemplate for a regex that has more than
    texts, spaces and named groups."""
    pieces: list[_Piece] = []
    at = 0
    while at < len(pattern):
        step = _STEP.match(pattern, at)
        if step is None:
            raise UnknownResponseTemplate(f"the pattern {pattern!r} has more than texts and groups")
        at = step.end()
        if step["space"]:
            pieces.append(_Piece())
        elif step["group"]:
            pieces.append(_Piece(group=step["group"]))
        else:
            char = {"n": "\n", "r": "\r", "t": "\t"}.get(step["letter"] or "", "")
            char = char or step["escaped"] or step["plain"]
            if pieces and pieces[-1].text:
                char = pieces.pop().text + char
            pieces.append(_Piece(text=char))
    return pieces


def _known(form: CallFormat) -> Calls:
    """Return the name of the format in `CALLS` that is read in the same way; else `form`."""
    for name, known in CALLS.items():
        if not known.is_bare and _marks(known) == _marks(form):
            return name
    return form


def _marks(form: CallFormat) -> tuple[str, ...]:
    """Return the fields that decide how calls are read."""
    keys = (
        (form.name_key, form.key)
        if form.syntax == "object"
        else (form.key * (form.syntax == "tags"),)
    )
    marks = (form.begin, form.end, form.syntax, form.separator, form.key_end, form.value_begin)
    return (*marks, form.value_end, form.quote, *keys)
