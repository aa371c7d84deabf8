"""Makes the last event of a stream whose replica failed, in the form of the stream's API."""

from __future__ import annotations

import msgspec

from minisgl.server.api.error_forms import in_form_of
from minisgl.server.errors import error_body


def last_event(path: str, headers: dict[bytes, bytes], error: Exception) -> bytes | None:
    """Return the event, or None if the answer is not a stream of events.

    headers: of the answer, with names in lower case.
    """
    body = error_body(error)[1]
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
    if kind == b"application/x-ndjson":
        return msgspec.json.encode(in_form_of(path, body)) + b"\n"
    if kind != b"text/event-stream":
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
