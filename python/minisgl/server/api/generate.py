"""POST /generate: the native form, one prompt in, text and token ids and timings out."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

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
            shape=_GenerateShape(),
            prompt_field=asked.prompt_field,
        )

    return routes


class _GenerateShape:
    """See `minisgl.server.respond.Shape`."""

    def whole(self, outputs: list[Output]) -> Generated:
        (output,) = outputs
        return _generated(output.text, output.token_ids, output.end)

    def opening(self) -> bytes:
        return b""

    def text(self, index: int, reply: TextReply) -> bytes:
        return event(GeneratedChunk(text=reply.text, token_ids=reply.token_ids))

    def end(self, index: int, end: Finished) -> bytes:
        return event(_generated("", [], end))

    def closing(self, ends: list[Finished]) -> bytes:
        return b""


def _generated(text: str, token_ids: list[int], end: Finished) -> Generated:
    return Generated(
        text=text,
        token_ids=token_ids,
        finish_reason=end.reason,
        stop_match=end.stop_match,
        usage=Usage.of([end]),
        timings=Timings.of([end]),
    )
