"""POST /generate: the native form, one prompt in, text and token ids and timings out."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from minisgl.core import Finished
from minisgl.message import TextReply
from minisgl.server import body
from minisgl.server.api.models import ServedModel
from minisgl.server.api.schema import Generated, GeneratedChunk, GenerateRequest, Timings, Usage
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, event, respond


def router(frontend: Frontend, model: ServedModel) -> APIRouter:
    routes = APIRouter()

    @routes.post("/generate", **operation(GenerateRequest, Generated, GeneratedChunk))
    async def generate(request: Request) -> Response:
        """Continue one of text, input_ids and messages; says how long each phase took."""
        asked = await body.read(request, GenerateRequest)
        return await respond(
            request,
            frontend,
            [asked.prompt],
            asked.sampling(model.defaults),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            stream=asked.stream,
            shape=_GenerateShape(logprobs=bool(asked.logprobs)),
            prompt_field=asked.prompt_field,
        )

    return routes


class _GenerateShape:
    """A `minisgl.server.respond.Shape`. logprobs: whether the request asks for them."""

    def __init__(self, *, logprobs: bool) -> None:
        self._has_logprobs = logprobs

    def whole(self, outputs: list[Output]) -> Generated:
        (output,) = outputs
        logprobs = self._shown(output.logprobs)
        return _generated(output.text, output.token_ids, logprobs, output.end)

    def opening(self) -> bytes:
        return b""

    def text(self, index: int, reply: TextReply) -> bytes:
        logprobs = self._shown(reply.logprobs or [])
        return event(GeneratedChunk(text=reply.text, token_ids=reply.token_ids, logprobs=logprobs))

    def end(self, index: int, end: Finished) -> bytes:
        return event(_generated("", [], self._shown([]), end))

    def closing(self, ends: list[Finished]) -> bytes:
        return b""

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
