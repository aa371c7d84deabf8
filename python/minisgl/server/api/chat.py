"""POST /v1/chat/completions, as OpenAI answers it."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from minisgl.core import Finished
from minisgl.message import TextReply
from minisgl.server import body
from minisgl.server.api.models import ServedModel
from minisgl.server.api.schema import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    ChunkChoice,
    Delta,
    Timings,
    Usage,
)
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, TextEvent, event, respond


def router(frontend: Frontend, model: ServedModel) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/chat/completions", **operation(ChatRequest, ChatCompletion, ChatCompletionChunk)
    )
    async def chat_completions(request: Request) -> Response:
        """Continue a chat; OpenAI's schema with a few extensions."""
        asked = await body.read(request, ChatRequest)
        model.check(asked.model)
        shape = _ChatShape(model.name, include_usage=asked.include_usage)
        return await respond(
            request,
            frontend,
            [asked.prompt],
            asked.sampling(model.defaults),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            stream=asked.stream,
            shape=shape,
            prompt_field="messages",
        )

    return routes


class _ChatShape:
    """See `minisgl.server.respond.Shape`."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._text = TextEvent(lambda text: self._chunk(Delta(content=text)))

    def whole(self, outputs: list[Output]) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AnswerMessage(content=output.text),
                    finish_reason=output.end.reason,
                )
                for index, output in enumerate(outputs)
            ],
            usage=Usage.of([output.end for output in outputs]),
            timings=Timings.of([output.end for output in outputs]),
        )

    def opening(self) -> bytes:
        return event(self._chunk(Delta(role="assistant", content="")))

    def text(self, index: int, reply: TextReply) -> bytes:
        return self._text(reply.text) if reply.text else b""

    def end(self, index: int, end: Finished) -> bytes:
        return event(self._chunk(Delta(), end))

    def closing(self, ends: list[Finished]) -> bytes:
        if not self._include_usage:
            return b""
        return event(
            ChatCompletionChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[],
                usage=Usage.of(ends),
                timings=Timings.of(ends),
            )
        )

    def _chunk(self, delta: Delta, end: Finished | None = None) -> ChatCompletionChunk:
        reason = end.reason if end else None
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[ChunkChoice(index=0, delta=delta, finish_reason=reason)],
            usage=None if self._include_usage else UNSET,
            timings=Timings.of([end]) if end else UNSET,
        )
