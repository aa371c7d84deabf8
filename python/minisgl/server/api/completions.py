"""POST /v1/completions, as OpenAI answers it: each prompt is one choice."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from minisgl.core import Finished
from minisgl.message import TextReply
from minisgl.server import body
from minisgl.server.api.models import ServedModel
from minisgl.server.api.schema import Completion, CompletionRequest, TextChoice, Timings, Usage
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, TextEvent, event, respond


def router(frontend: Frontend, model: ServedModel) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", **operation(CompletionRequest, Completion, Completion))
    async def completions(request: Request) -> Response:
        """Continue texts or token ids; OpenAI's schema with a few extensions."""
        asked = await body.read(request, CompletionRequest)
        model.check(asked.model)
        prompts = asked.prompts
        shape = _CompletionShape(model.name, len(prompts), include_usage=asked.include_usage)
        return await respond(
            request,
            frontend,
            prompts,
            asked.sampling(model.defaults),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            stream=asked.stream,
            shape=shape,
            prompt_field="prompt",
        )

    return routes


class _CompletionShape:
    """See `minisgl.server.respond.Shape`."""

    def __init__(self, model: str, num_prompts: int, *, include_usage: bool) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._texts = [self._text_event(index) for index in range(num_prompts)]

    def whole(self, outputs: list[Output]) -> Completion:
        choices = [
            TextChoice(index=index, text=output.text, finish_reason=output.end.reason)
            for index, output in enumerate(outputs)
        ]
        ends = [output.end for output in outputs]
        return self._completion(choices, Usage.of(ends), Timings.of(ends))

    def opening(self) -> bytes:
        return b""

    def text(self, index: int, reply: TextReply) -> bytes:
        return self._texts[index](reply.text) if reply.text else b""

    def end(self, index: int, end: Finished) -> bytes:
        return event(self._chunk(index, "", end))

    def closing(self, ends: list[Finished]) -> bytes:
        if not self._include_usage:
            return b""
        return event(self._completion([], Usage.of(ends), Timings.of(ends)))

    def _text_event(self, index: int) -> TextEvent:
        return TextEvent(lambda text: self._chunk(index, text))

    def _chunk(self, index: int, text: str, end: Finished | None = None) -> Completion:
        choice = TextChoice(index=index, text=text, finish_reason=end.reason if end else None)
        timings = Timings.of([end]) if end else UNSET
        return self._completion([choice], None if self._include_usage else UNSET, timings)

    def _completion(
        self,
        choices: list[TextChoice],
        usage: Usage | UnsetType | None,
        timings: Timings | UnsetType,
    ) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            timings=timings,
        )
