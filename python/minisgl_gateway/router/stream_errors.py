"""Makes the last event of a stream whose replica failed, in the form of the stream's API."""

from __future__ import annotations

import msgspec

from minisgl.server.web.errors import error_body, in_form_of
from minisgl_gateway.router.upstream import EVENTS, JSON_LINES


def last_event(path: str, media_type: bytes, error: Exception) -> bytes | None:
    """Return the event, or None if the answer is not a stream of events. media_type: of the
    answer."""
    body = error_body(error)[1]
    if media_type == JSON_LINES:
        return msgspec.json.encode(in_form_of(path, body)) + b"\n"
    if media_type != EVENTS:
        return None
    name = b""
    form: object = in_form_of(path, body)
    if path.startswith("/v1/messages"):
        name = b"event: error\n"
    elif path.startswith("/v1/responses"):
        name = b"event: error\n"
        shown = body.error
        form = {"type": "error", "code": shown.code, "message": shown.message, "param": shown.param}
    return name + b"data: " + msgspec.json.encode(form) + b"\n\n"
