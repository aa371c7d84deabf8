"""What routes are built from: rows of the table `routes`, the server that they belong to, and their
description in /openapi.json."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import APIRouter, FastAPI

from minisgl.server.clients import Keys
from minisgl.server.frontend import Frontend
from minisgl.server.model import ServedModel
from minisgl.server.web.errors import ErrorBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The server that routes belong to. keys: None if every client may use it. open_ids: the
    X-Request-Ids of all requests that have no whole answer yet."""

    frontend: Frontend
    model: ServedModel
    keys: Keys | None
    open_ids: Container[str]


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes that one row adds. router: makes them. records: the bodies and answers that
    /openapi.json describes, with the records inside them."""

    router: Callable[[Site], APIRouter]
    records: tuple[type[msgspec.Struct], ...] = ()


_REF: Final = "#/components/schemas/{name}"


class DocumentedAPI(FastAPI):
    """A FastAPI application whose schema has `records` and the records inside them."""

    def __init__(self, records: Sequence[type[msgspec.Struct]], **settings: Any) -> None:
        super().__init__(**settings)
        self._records = [*records, ErrorBody]

    def openapi(self) -> dict[str, Any]:
        """Return the schema. It is made once, because each 404 reads it."""
        if self.openapi_schema:
            return self.openapi_schema
        page = super().openapi()
        _, components = msgspec.json.schema_components(self._records, ref_template=_REF)
        page.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return page


def operation(
    request: type[msgspec.Struct] | None,
    response: type[msgspec.Struct],
    *chunks: type[msgspec.Struct],
    error: type[msgspec.Struct] = ErrorBody,
    stream: str = "text/event-stream",
    other: type[msgspec.Struct] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a route that document its body, answer, stream and errors.

    chunks: the records of a stream. stream: its media type. other: another form of the answer.
    """
    answer = {"anyOf": [_ref(response), _ref(other)]} if other else _ref(response)
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if chunks:
        refs = [_ref(chunk) for chunk in chunks]
        schema = {"anyOf": refs} if len(refs) > 1 else refs[0]
        content[stream] = {"schema": _sse(schema) if stream == "text/event-stream" else schema}
    documented: dict[str, Any] = {
        "responses": {
            200: {"description": "The answer", "content": content},
            "default": {
                "description": "What is wrong",
                "content": {"application/json": {"schema": _ref(error)}},
            },
        }
    }
    if request is not None:
        body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
        documented["openapi_extra"] = {"requestBody": body}
    return documented


def _sse(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a server-sent event, whose data is JSON or the text `[DONE]`."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    done = {"anyOf": [{"const": "[DONE]"}, data]}
    properties = {"event": {"type": "string"}, "data": done}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}
