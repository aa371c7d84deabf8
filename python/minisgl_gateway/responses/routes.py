"""/v1/responses: OpenAI's Responses.

Answers are kept in memory (`ResponseStore`), for `previous_response_id` and GET
/v1/responses/{id}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from fastapi import APIRouter, Request, Response

from minisgl.errors import InvalidRequest
from minisgl.server.api.messages import Message, ToolCall, ToolFunction
from minisgl.server.errors import refusal
from minisgl.server.site import operation
from minisgl.server.strict import Json
from minisgl.server.web import body
from minisgl_gateway.chat import Asked, Chat, fitting
from minisgl_gateway.in_process import in_process
from minisgl_gateway.pictures import readable
from minisgl_gateway.responses.answer import (
    EVENTS,
    CustomCall,
    FunctionCall,
    OutputItem,
    OutputMessage,
    ResponseObject,
)
from minisgl_gateway.responses.request import NAMES, ResponsesRequest
from minisgl_gateway.responses.store import ResponseStore
from minisgl_gateway.responses.stream import ResponseForm
from minisgl_gateway.responses.tools import custom_arguments

_INSTEAD: Final = {
    "/v1/responses/input_tokens": "/tokenize counts the tokens of a chat",
    "/v1/responses/compact": "leave out old items of input; /tokenize counts the tokens of a chat",
}
"""What to use instead of OpenAI's other POST requests below /v1/responses."""


class Deleted(Json, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def router(chat: Chat) -> APIRouter:
    routes = APIRouter()
    store = ResponseStore()

    @routes.post("/v1/responses", **operation(ResponsesRequest, ResponseObject, *EVENTS))
    async def responses(request: Request) -> Response:
        """Continue a conversation; OpenAI's schema of Responses."""
        asked = await body.read(request, ResponsesRequest)
        model = await chat.model(request, asked.model)
        owner, earlier = chat.owner(request), []
        asked = asked.resolved(lambda id, path: store.item(id, owner, path))
        if id := asked.previous_response_id:
            earlier = store.get(id, owner, param="previous_response_id", status=400).messages
        wanted, left_out = fitting(asked.chat(earlier), model, NAMES)

        def keep(answer: ResponseObject) -> None:
            if asked.store is not False:
                messages = [*earlier, *asked.messages, _spoken(answer.output)]
                store.put(owner, messages, answer)

        wanted, of_items = readable(wanted, asked.left_out, model.abilities.reads_images)
        whole = Asked(chat=wanted, names=NAMES, left_out=[*of_items, *left_out])
        form = ResponseForm(ResponseObject.begun(model, asked), keep, asked.offered)
        return await chat.answer(request, whole, form)

    @routes.post("/v1/responses/input_tokens", include_in_schema=False)
    @routes.post("/v1/responses/compact", include_in_schema=False)
    async def refuse(request: Request) -> Response:
        """Say what to use instead of OpenAI's other calls."""
        path = request.url.path
        raise refusal(
            f"{path} is not supported here: {_INSTEAD[path]}", status=404, code="not_found"
        )

    @routes.get("/v1/responses/{id}", **operation(None, ResponseObject))
    async def retrieve(id: str, request: Request) -> Response:
        """A kept answer."""
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest(
                "stream is supported only as false: a kept answer is whole", param="stream"
            )
        return body.response(store.get(id, chat.owner(request)).answer)

    @routes.delete("/v1/responses/{id}", **operation(None, Deleted))
    async def delete(id: str, request: Request) -> Response:
        """Delete a kept answer."""
        store.delete(id, chat.owner(request))
        return body.response(Deleted(id=id))

    return routes


def _spoken(items: Sequence[OutputItem]) -> Message:
    """Return the answer as a message of a chat."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        if isinstance(item, FunctionCall | CustomCall):
            name = f"{item.namespace}.{item.name}" if item.namespace else item.name
            arguments = (
                custom_arguments(item.input) if isinstance(item, CustomCall) else item.arguments
            )
            function = ToolFunction(name=name, arguments=arguments)
            calls.append(ToolCall(id=item.call_id, function=function))
        else:
            text = "".join(part.text for part in item.content)
            (texts if isinstance(item, OutputMessage) else thoughts).append(text)
    return Message(
        role="assistant",
        content="".join(texts) or (None if calls else ""),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


ROUTES: Final = in_process(router, (ResponsesRequest, ResponseObject, Deleted, *EVENTS))
