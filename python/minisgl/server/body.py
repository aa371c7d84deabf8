"""JSON bodies of requests and responses, read into records and written from them."""

from __future__ import annotations

import asyncio
import codecs
import difflib
import re
from typing import Final, TypeVar

import msgspec
from fastapi import Request, Response

from minisgl.errors import InvalidRequest
from minisgl.server.api.schema import Json
from minisgl.server.errors import refusal
from minisgl.utils.text import brief, shortened

MAX_BODY_BYTES: Final = 16 * 2**20  # a million tokens are about 5 MB of English
MAX_PAUSE_S = 30.0
"""The longest wait for the next piece of a body. A slower client may only want to hold a connection
open."""

R = TypeVar("R", bound=Json)

# msgspec's messages quote field names, and a client may send one that looks like a path. Only the
# path at the very end is msgspec's own.
_PATH = re.compile(r" - at `(?:key in )?\$\.?([\w.\[\]]*)`\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")

_EXPECTED = re.compile(r"^Expected `(.*?)`(?:(.*), got `(.*)`)?")
_TYPES: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}
"""Names of JSON's types, by msgspec's. Its null is null."""

# (a pattern of the path's end, what msgspec's message leaves out); the first that matches is used.
_HINTS: Final = (
    (r"\brole", "the roles are system, developer, user, assistant and tool"),
    (r"tool_calls\[\d+\]\.type", "tool calls are of type function"),
    (r"tools\[\d+\]\.type", "tools are of type function"),
    (r"tool_choice(\.type)?", "it is auto, none, required, or a function by name"),
    (
        r"content\[\d+\]\.type",
        "content parts are of type text, in /v1/messages also thinking, tool_use and tool_result",
    ),
    (
        r"input\[\d+\]\.type",
        "items are messages, function and custom tool calls, their outputs, and reasoning",
    ),
    (r"\btop_k", "0 and -1 are for all"),
)

_SYNONYMS: Final = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "stop": "stop_sequences",
    "messages": "input",
}
"""Other APIs' names of our fields."""


async def read(request: Request, kind: type[R], *, any_type: bool = False) -> R:
    """Return the body as a `kind`, each field of which is honoured or neutral.

    any_type: accept any Content-Type, because Ollama's documentation calls curl without that
    header. Raises InvalidRequest.
    """
    content_type = request.headers.get("content-type", "")
    is_json = any_type or content_type.partition(";")[0].strip().lower() == "application/json"
    if not is_json:
        got = brief(content_type) if content_type else "none"
        raise refusal(
            f"the content type must be application/json, got {got}: add the header "
            "'Content-Type: application/json'",
            status=415,
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise refusal(
            f"bodies must have no content encoding, got {brief(encoding)}: send the JSON "
            "uncompressed, without the header Content-Encoding",
            status=415,
            code="unsupported_media_type",
        )
    parsed = parse(await read_bytes(request), kind)
    parsed.refuse_unsupported()
    return parsed


def response(record: object, status: int = 200) -> Response:
    """Return a response whose body is `record` as JSON."""
    return Response(msgspec.json.encode(record), status, media_type="application/json")


async def read_bytes(request: Request) -> bytes:
    """Return the body. Raises InvalidRequest if it is too long, or if its next piece is late."""
    body, stream = bytearray(), aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(MAX_PAUSE_S):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise refusal(
                f"the body is not complete, and no part of it came for {MAX_PAUSE_S:g} s: is the "
                "Content-Length right?",
                status=408,
                code="body_timeout",
            ) from None
        if chunk is None:
            break
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise refusal(
                f"the body exceeds {MAX_BODY_BYTES} bytes", status=413, code="body_too_large"
            )
    return bytes(body)


_MARKS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LONE: Final = " (half of a surrogate pair is escaped alone, such as \\ud800)"
MAX_NAME: Final = 64  # characters of an unknown field's name that an error repeats


def parse(body: bytes, kind: type[R]) -> R:
    """Decode strictly. Raises InvalidRequest, which names the wrong field if one is wrong."""
    if not body:
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind) from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"the body is not valid JSON: {reason}{_hint(body, reason)}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid UTF-8: byte 0x{error.object[error.start]:02x} in a string"
        ) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _hint(body: bytes, reason: str) -> str:
    """Return what probably caused msgspec's error, in parentheses, or ""."""
    if body.startswith(_MARKS):
        return " (send UTF-8 without a byte order mark)"
    if body.isspace():
        return " (it has only spaces)"
    if "surrogate" in reason or ("truncated" in reason and b"\\ud" in body.lower()):
        return _LONE
    found = re.search(r"invalid character \(byte (\d+)\)", reason)
    if found and body.startswith((b"NaN", b"Infinity"), int(found[1])):
        return " (NaN and Infinity are not JSON)"
    return ""


def _field_error(text: str, kind: type[R]) -> InvalidRequest:
    """Return a refusal for msgspec's "Expected `int`, got `str` - at `$.max_tokens`"."""
    found = _PATH.search(text)
    path = found[1] if found else ""
    text = text[: found.start()] if found else text
    prefix = f"{path}." if path else ""
    if missing := _MISSING.match(text):
        name = prefix + missing[1]
        return InvalidRequest(f"the field {name} is missing", param=name)
    if unknown := _UNKNOWN.match(text):
        given = unknown[1]
        name = prefix + shortened(given, MAX_NAME)
        known = [] if path else [field.encode_name for field in msgspec.structs.fields(kind)]
        # min_tokens and max_tokens are similar names with opposite meanings.
        opposite = {"min": "max", "max": "min"}.get(given[:3], "")
        known = [name for name in known if not opposite or not name.startswith(opposite)]
        same = [_SYNONYMS[given]] if _SYNONYMS.get(given) in known else []
        near = same or difflib.get_close_matches(given[: MAX_NAME + 1], known, n=1, cutoff=0.85)
        hint = f"; did you mean {near[0]}?" if near else ""
        return InvalidRequest(f"the field {name} is not known here{hint}", param=name)
    text = _EXPECTED.sub(_in_words, shortened(text, 300))
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {text}")
    hint = next((hint for end, hint in _HINTS if re.search(f"{end}\\Z", path)), "")
    return InvalidRequest(f"{path}: {text}{hint and f'; {hint}'}", param=path)


def _in_words(found: re.Match[str]) -> str:
    """Return "expected an integer or null, got a string" for "Expected `int | null`, got `str`"."""
    names = [_TYPES.get(name, name) for name in found[1].split(" | ")]
    expected = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    if not found[3]:
        return f"expected {expected}"
    got = "a decimal number" if found[3] == "float" else _TYPES.get(found[3], found[3])
    return f"expected {expected}{found[2]}, got {got}"
