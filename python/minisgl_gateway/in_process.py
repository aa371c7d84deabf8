"""Asks the server of this process: a door's request goes the way of a request to chat completions,
from `minisgl.server.web.respond` on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl.core import Finished
from minisgl.core.answer import Part
from minisgl.message import TextPrompt, TextReply, ids_from_bytes
from minisgl.server.api.answers import ChatLogprobs, Timings, TokenLogprob, Usage
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.left_out import OmissionLog
from minisgl.server.site import Routes, Site
from minisgl.server.web.errors import ErrorBody
from minisgl.server.web.respond import Output, Shape, respond
from minisgl_gateway.card import ModelCard, read_card
from minisgl_gateway.chat import Asked, Chat, End, Form, Model
from minisgl_gateway.codec import encode, key_number


class InProcess(Chat):
    """Mutable: it keeps which omissions it has logged."""

    def __init__(self, site: Site) -> None:
        self._frontend, self._model = site.frontend, site.model
        self._omissions = OmissionLog()

    async def models(self, request: Request) -> Sequence[Model]:
        return [self._named(name) for name in self._model.all_names]

    async def model(self, request: Request, name: str | None) -> Model:
        return self._named(self._model.check(name))

    async def answer(self, request: Request, asked: Asked, form: Form) -> Response:
        sampling, names = asked.chat.params(self._model.defaults, asked.names)
        return await respond(
            request,
            self._frontend,
            [TextPrompt(text=asked.text) if asked.text is not None else asked.chat.split_prompt],
            sampling,
            asked.chat,
            shape=_FormShape(form, has_logprobs=bool(asked.chat.logprobs)),
            names={**asked.all_names, **names},
            warning=self._omissions.warning(asked.left_out),
        )

    async def count_tokens(self, request: Request, chat: ChatRequest) -> int:
        reply = await encode(self._frontend, chat.split_prompt, key_number(request.scope))
        return len(ids_from_bytes(reply.ids))

    def owner(self, request: Request) -> str:
        key = request.scope.get("api_key")
        return key.name if key else ""

    @cached_property
    def card(self) -> ModelCard:
        """It is read from the checkpoint when it is first used."""
        return read_card(self._model.folder)

    def _named(self, name: str) -> Model:
        model = self._model
        return Model(
            name=name,
            template=model.template,
            abilities=model.abilities,
            has_efforts=model.has_efforts,
            capabilities=model.capabilities,
            context_length=self._frontend.context_length,
            created=model.created,
            defaults=model.shown_defaults,
        )


def in_process(
    router: Callable[[Chat], APIRouter], records: tuple[type[msgspec.Struct], ...]
) -> Routes:
    """Return a door's row of the table `routes`. router: makes its routes."""
    return Routes(lambda site: router(InProcess(site)), records)


class _FormShape(Shape):
    """Writes the answer to the only prompt of a call in a `Form`."""

    def __init__(self, form: Form, *, has_logprobs: bool) -> None:
        self.media_type = form.media_type
        self._form, self._has_logprobs = form, has_logprobs

    def whole(self, outputs: list[Output]) -> msgspec.Struct:
        (output,) = outputs
        return self._form.whole(_parts(output), self._logprobs(output), _end(output.end))

    def opening(self, num_prompt_tokens: int) -> bytes:
        return self._form.opening(num_prompt_tokens)

    def text(self, index: int, reply: TextReply) -> bytes:
        return self._form.text(_parts(reply), self._logprobs(reply))

    def end(self, index: int, end: Finished) -> bytes:
        return self._form.end(_end(end))

    def closing(self, ends: list[Finished]) -> bytes:
        return b""

    def failure(self, error: ErrorBody) -> bytes:
        return self._form.failure(error)

    def _logprobs(self, output: Output | TextReply) -> list[TokenLogprob]:
        if not self._has_logprobs:
            return []
        return ChatLogprobs.of(output.tokens, output.logprobs or []).content


def _parts(output: Output | TextReply) -> Sequence[Part]:
    return output.parts or ([("content", output.text)] if output.text else [])


def _end(end: Finished) -> End:
    return End(
        is_cut=end.reason == "length",
        stop=end.stop_match,
        usage=Usage.of([end]),
        timings=Timings.of([end]),
    )
