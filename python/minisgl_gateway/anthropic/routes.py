"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages.

A request becomes a `ChatRequest`, so its prompt and options are those of chat completions.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from minisgl.message import ids_from_bytes
from minisgl.server import body
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.error_forms import ErrorEvent
from minisgl.server.api.left_out import BUDGET, EFFORT, Omission, OmissionLog, fitting
from minisgl.server.api.schema import Json
from minisgl.server.clients import key_number
from minisgl.server.openapi import operation
from minisgl.server.respond import respond
from minisgl.server.site import Routes, Site
from minisgl_gateway.anthropic.answer import EVENTS, AnthropicMessage, MessageShape
from minisgl_gateway.anthropic.request import CountRequest, MessagesRequest

_NAMES: Final = {"response_format.json_schema": "output_config.format", "stop": "stop_sequences"}
"""The request's names of fields, by their names in chat completions."""
_REASONING: Final = {EFFORT: "output_config.effort", BUDGET: "thinking.budget_tokens"}


class TokenCount(Json, frozen=True, kw_only=True):
    input_tokens: int


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()
    omissions = OmissionLog()

    def chat_of(asked: CountRequest) -> tuple[ChatRequest, list[Omission]]:
        # "high" is Anthropic's default effort, so it is left out without a warning.
        chat, left_out = fitting(asked.chat, model.card, _REASONING, default_effort="high")
        return chat, [*asked.left_out, *left_out]

    @routes.post(
        "/v1/messages",
        **operation(MessagesRequest, AnthropicMessage, *EVENTS, error=ErrorEvent),
    )
    async def messages(request: Request) -> Response:
        """Continue a chat; Anthropic's schema with a few extensions."""
        asked = await body.read(request, MessagesRequest)
        name = model.check(asked.model)
        chat, left_out = chat_of(asked)
        sampling, names = chat.params(model.defaults, _NAMES)
        return await respond(
            request,
            frontend,
            [chat.split_prompt],
            sampling,
            chat,
            shape=MessageShape(name, asked),
            names={"prompt": "messages", **names},
            is_clamped=True,
            warning=omissions.warning(left_out),
        )

    @routes.post(
        "/v1/messages/count_tokens", **operation(CountRequest, TokenCount, error=ErrorEvent)
    )
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of the prompt that /v1/messages makes of the same request."""
        asked = await body.read(request, CountRequest)
        model.check(asked.model)
        prompt = chat_of(asked)[0].split_prompt
        limits = key_number(request.scope), frontend.context_length
        reply = await frontend.round_trips.encode(prompt, *limits)
        return body.response(TokenCount(input_tokens=len(ids_from_bytes(reply.ids))))

    return routes


ROUTES: Final = Routes(
    router, (MessagesRequest, CountRequest, AnthropicMessage, TokenCount, *EVENTS)
)
