"""POST /generate: the native form. One prompt in; text, token ids and timings out."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from minisgl.core import Finished, FinishReason, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, TextPrompt, TextReply
from minisgl.server import body
from minisgl.server.api.messages import Message, TemplateArgs, chat_prompt
from minisgl.server.api.models import ServedModel
from minisgl.server.api.schema import (
    Json,
    NonNegative,
    SamplingFields,
    Timings,
    Usage,
    token_prompt,
)
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, Shape, event, respond


class GenerateRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /generate. Exactly one of text, input_ids and messages is given."""

    text: str | None = None
    input_ids: list[NonNegative] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    chat_template_kwargs: TemplateArgs = None
    logprobs: Annotated[
        bool | None,
        Meta(
            description="Report each token's log-probability under the model's own distribution, "
            "before temperature and filters."
        ),
    ] = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        params = super().sampling(defaults)
        return msgspec.structs.replace(params, logprobs=bool(self.logprobs))

    @property
    def prompt_field(self) -> str:
        """Which of the three the prompt came in."""
        if self.messages is not None:
            return "messages"
        return "text" if self.input_ids is None else "input_ids"

    @property
    def prompt(self) -> Prompt:
        if sum(given is not None for given in (self.text, self.input_ids, self.messages)) != 1:
            raise InvalidRequest("give exactly one of text, input_ids and messages", param="text")
        if self.chat_template_kwargs is not None and self.messages is None:
            raise InvalidRequest(
                "chat_template_kwargs is for messages", param="chat_template_kwargs"
            )
        if self.messages is not None:
            return chat_prompt(self.messages, self.chat_template_kwargs)
        if self.text is not None:
            return TextPrompt(text=self.text)
        return token_prompt(self.input_ids, "input_ids")


class Generated(Json, frozen=True, kw_only=True):
    """The answer of /generate; in a stream the last event, whose text and lists are empty."""

    text: str
    token_ids: list[int]
    logprobs: list[float] | UnsetType = UNSET
    finish_reason: FinishReason
    stop_match: str | int | None
    usage: Usage
    timings: Timings


class GeneratedChunk(Json, frozen=True, kw_only=True):
    text: str
    token_ids: list[int]
    logprobs: list[float] | UnsetType = UNSET


RECORDS: Final = (GenerateRequest, Generated, GeneratedChunk)
"""The roots of this family's schema in /openapi.json."""


def router(frontend: Frontend, model: ServedModel) -> APIRouter:
    routes = APIRouter()

    @routes.post("/generate", **operation(GenerateRequest, Generated, GeneratedChunk))
    async def generate(request: Request) -> Response:
        """Continue one of text, input_ids and messages; says how long each phase took."""
        asked = await body.read(request, GenerateRequest)
        sampling, names = asked.with_form(asked.sampling(model.defaults))
        return await respond(
            request,
            frontend,
            [asked.prompt],
            sampling,
            timeout_s=asked.timeout,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            stream=asked.stream,
            shape=_GenerateShape(logprobs=bool(asked.logprobs)),
            names={"prompt": asked.prompt_field, **names},
        )

    return routes


class _GenerateShape(Shape):
    """logprobs: whether the request asks for them."""

    def __init__(self, *, logprobs: bool) -> None:
        self._has_logprobs = logprobs

    def whole(self, outputs: list[Output]) -> Generated:
        (output,) = outputs
        logprobs = self._shown(output.logprobs)
        return _generated(output.text, output.token_ids, logprobs, output.end)

    def text(self, index: int, reply: TextReply) -> bytes:
        logprobs = self._shown(reply.logprobs or [])
        return event(GeneratedChunk(text=reply.text, token_ids=reply.token_ids, logprobs=logprobs))

    def end(self, index: int, end: Finished) -> bytes:
        return event(_generated("", [], self._shown([]), end))

    def _shown(self, logprobs: list[float]) -> list[float] | UnsetType:
        return logprobs if self._has_logprobs else UNSET


def _generated(
    text: str, token_ids: list[int], logprobs: list[float] | UnsetType, end: Finished
) -> Generated:
    return Generated(
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=end.reason,
        stop_match=end.stop_match,
        usage=Usage.of([end]),
        timings=Timings.of([end]),
    )
