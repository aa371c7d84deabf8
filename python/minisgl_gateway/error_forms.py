"""An error in the forms of other vendors' APIs, which differ by path."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from minisgl.errors import CONTEXT_IS, PromptTooLong
from minisgl.server.strict import Json
from minisgl.server.web.errors import ErrorBody


class AnthropicError(Json, frozen=True, kw_only=True):
    type: str
    message: str
    param: str | None
    code: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class ErrorEvent(Json, tag_field="type", tag="error", frozen=True, kw_only=True):
    """An error of Anthropic's API, as a body and as an event of a stream."""

    error: AnthropicError


_KINDS: Final = {
    "model_not_found": "not_found_error",
    "not_found": "not_found_error",
    "body_too_large": "request_too_large",
    "invalid_api_key": "authentication_error",
    "not_permitted": "permission_error",
    "foreign_page": "permission_error",
    "unknown_host": "permission_error",
    "deadline_exceeded": "timeout_error",
    "draining": "overloaded_error",
    "queue_timeout": "overloaded_error",
    "restarting": "overloaded_error",
}
"""Anthropic's types of errors, by this server's codes. Other codes get a type by HTTP status."""

_TOO_LONG: Final = (
    (
        re.compile(rf"([\d,]+) tokens?, but {CONTEXT_IS} (\d+)"),
        "prompt is too long: {} tokens > {}",
    ),
    (
        re.compile(rf"([\d,]+) tokens? and max_tokens asks for (\d+) more, .+ {CONTEXT_IS} (\d+)"),
        "input length and `max_tokens` exceed context limit: {} + {} > {}",
    ),
)
"""Our words for what does not fit, and Anthropic's, by which Claude Code compacts the chat or asks
for fewer tokens. Clients of OpenAI's forms know it by `code`, or by our words."""


_DETAILS: Final = {"thread": {"error_code": "thread_unsupported_request"}}
"""Anthropic's details of a refusal, by its field. With these the tool runners of its clients, which
ask for a thread first, send the whole conversation instead."""


def anthropic_error(body: ErrorBody) -> ErrorEvent:
    error, message = body.error, body.error.message
    kind = "api_error" if error.type == "server_error" else error.type
    kind = _KINDS.get(error.code, kind)
    for ours, words in _TOO_LONG if error.code == PromptTooLong.code else ():
        if found := ours.search(message):
            counts = [number.replace(",", "") for number in found.groups()]
            message = f"{words.format(*counts)} ({message})"
            break
    details = _DETAILS.get(error.param or "", msgspec.UNSET)
    return ErrorEvent(
        error=AnthropicError(
            type=kind, message=message, param=error.param, code=error.code, details=details
        )
    )


class OllamaError(Json, frozen=True, kw_only=True):
    error: str


def ollama_error(body: ErrorBody) -> OllamaError:
    return OllamaError(error=body.error.message)
