"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.left_out import Omission
from minisgl.server.site import operation
from minisgl.server.strict import Json
from minisgl.server.web import body
from minisgl_gateway.anthropic.answer import EVENTS, AnthropicMessage, MessageForm
from minisgl_gateway.anthropic.request import CountRequest, MessagesRequest
from minisgl_gateway.chat import Asked, Chat, Model, fitting
from minisgl_gateway.error_forms import ErrorEvent
from minisgl_gateway.in_process import in_process
from minisgl_gateway.pictures import readable

NAMES: Final = {
    "prompt": "messages",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking.type",
    "thinking_budget": "thinking.budget_tokens",
}
"""The request's names of fields, by their names in chat completions."""
_OLDER: Final = NAMES | {"response_format.json_schema": "output_format"}
"""The same, of a request with the older name of `output_config.format`."""


class TokenCount(Json, frozen=True, kw_only=True):
    input_tokens: int


def router(chat: Chat) -> APIRouter:
    routes = APIRouter()

    def chat_of(asked: CountRequest, model: Model) -> tuple[ChatRequest, list[Omission]]:
        # "high" is Anthropic's default effort, so it is left out without a warning.
        request, left_out = fitting(asked.chat, model, NAMES, default_effort="high")
        request, of_blocks = readable(request, asked.left_out, model.abilities.reads_images)
        return request, [*of_blocks, *left_out]

    @routes.post(
        "/v1/messages",
        **operation(MessagesRequest, AnthropicMessage, *EVENTS, error=ErrorEvent),
    )
    async def messages(request: Request) -> Response:
        """Continue a chat; Anthropic's schema with a few extensions."""
        asked = await body.read(request, MessagesRequest)
        model = await chat.model(request, asked.model)
        wanted, left_out = chat_of(asked, model)
        tools = [f"tools.{tool.name}" for tool in asked.tools or ()]
        schemas = {f"{tool}.parameters": f"{tool}.input_schema" for tool in tools}
        names = schemas | (_OLDER if asked.output_format else NAMES)
        whole = Asked(chat=wanted, names=names, left_out=left_out)
        return await chat.answer(request, whole, MessageForm(model.name, asked))

    @routes.post(
        "/v1/messages/count_tokens", **operation(CountRequest, TokenCount, error=ErrorEvent)
    )
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of the prompt that /v1/messages makes of the same request."""
        asked = await body.read(request, CountRequest)
        wanted, _ = chat_of(asked, await chat.model(request, asked.model))
        return body.response(TokenCount(input_tokens=await chat.count_tokens(request, wanted)))

    return routes


ROUTES: Final = in_process(
    router, (MessagesRequest, CountRequest, AnthropicMessage, TokenCount, *EVENTS)
)
