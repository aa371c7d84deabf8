"""POST /generate: this server's own API, whose answers have token ids and timings."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from minisgl.core import Finished, FinishReason
from minisgl.core.sampling import MAX_CHOICES
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, TextPrompt, TextReply
from minisgl.server.api.answers import PromptLogprob, Timings, Usage
from minisgl.server.api.messages import Message, TemplateArgs, chat_prompt
from minisgl.server.api.schema import NonNegative, SamplingFields, token_prompt
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json
from minisgl.server.web import body
from minisgl.server.web.respond import Output, Shape, event, respond


class GenerateRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /generate. Exactly one of text, input_ids and messages is given; prompt is another name
    of the first two."""

    model: Annotated[
        str | None, Meta(description="The served model's name, or that of a LoRA adapter.")
    ] = None
    text: str | None = None
    input_ids: list[NonNegative] | None = None
    prompt: Annotated[
        str | list[NonNegative] | None,
        Meta(description="The same as text or input_ids, the original mini-sglang's name."),
    ] = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    chat_template_kwargs: TemplateArgs = None
    logprobs: Annotated[
        bool | None,
        Meta(
            description="Report each token's log-probability under the model's own distribution, "
            "before temperature and filters."
        ),
    ] = None

    prompt_logprobs: Annotated[
        NonNegative | None,
        Meta(
            description="Report the log-probability of each token of the prompt, and as many of "
            "the most likely tokens at its position, at most 20."
        ),
    ] = None
    max_tokens: NonNegative | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Choices of the answer.")] | None = (
        None
    )

    @property
    def prompt_field(self) -> str:
        """The name of the field that has the prompt: messages, text or input_ids."""
        if self.messages is not None:
            return "messages"
        return "text" if self.input_ids is None else "input_ids"

    @property
    def given(self) -> Prompt:
        """The prompt. Raises InvalidRequest."""
        if sum(given is not None for given in (self.text, self.input_ids, self.messages)) != 1:
            raise InvalidRequest("give exactly one of text, input_ids and messages", param="text")
        if self.chat_template_kwargs is not None and self.messages is None:
            raise InvalidRequest(
                "chat_template_kwargs goes with messages, not with text or input_ids",
                param="chat_template_kwargs",
            )
        if self.messages is not None:
            return chat_prompt(self.messages, self.chat_template_kwargs)
        if self.text is not None:
            return TextPrompt(text=self.text)
        return token_prompt(self.input_ids, "input_ids")


class GeneratedChunk(Json, frozen=True, kw_only=True):
    index: int | UnsetType = UNSET
    text: str
    token_ids: list[int]
    logprobs: list[float] | UnsetType = UNSET
    prompt_logprobs: list[PromptLogprob] | UnsetType = UNSET


class Generated(GeneratedChunk, frozen=True, kw_only=True):
    """The answer; in a stream its last event, whose text and lists are empty.

    index: of the choice, if the request asks for several.
    """

    finish_reason: FinishReason
    stop_match: str | int | None
    usage: Usage
    timings: Timings


class GeneratedChoices(Json, frozen=True, kw_only=True):
    """The answer if the request asks for several choices."""

    choices: list[Generated]
    usage: Usage
    timings: Timings


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()

    @routes.post(
        "/generate",
        **operation(GenerateRequest, Generated, Generated, GeneratedChunk, other=GeneratedChoices),
    )
    async def generate(request: Request) -> Response:
        """Continue one of text, input_ids and messages. The answer has the time of each phase."""
        asked = await body.read(request, GenerateRequest)
        model.check(asked.model)
        sampling, names = asked.params(model.defaults)
        return await respond(
            request,
            frontend,
            [asked.given],
            sampling,
            asked,
            shape=_GenerateShape(asked),
            names={"prompt": names.get(asked.prompt_field, asked.prompt_field), **names},
            num_choices=asked.n or 1,
        )

    return routes


class _GenerateShape(Shape):
    def __init__(self, asked: GenerateRequest) -> None:
        self._num_choices = asked.n or 1
        self._has_logprobs = bool(asked.logprobs)
        self._has_prompt = asked.prompt_logprobs is not None

    def whole(self, outputs: list[Output]) -> Generated | GeneratedChoices:
        choices = [
            self._generated(index, output.end, output) for index, output in enumerate(outputs)
        ]
        if self._num_choices == 1:
            return choices[0]
        ends = [output.end for output in outputs]
        return GeneratedChoices(
            choices=choices, usage=Usage.of(ends, self._num_choices), timings=Timings.of(ends)
        )

    def text(self, index: int, reply: TextReply) -> bytes:
        return event(GeneratedChunk(**self._piece(index, reply)))

    def end(self, index: int, end: Finished) -> bytes:
        return event(self._generated(index, end, None))

    def _generated(self, index: int, end: Finished, output: Output | None) -> Generated:
        return Generated(
            **self._piece(index, output),
            finish_reason=end.reason,
            stop_match=end.stop_match,
            usage=Usage.of([end]),
            timings=Timings.of([end]),
        )

    def _piece(self, index: int, shown: Output | TextReply | None) -> dict[str, Any]:
        """Return the fields of a chunk. shown: the output that it has."""
        fields: dict[str, Any] = {
            "text": shown.text if shown else "",
            "token_ids": shown.token_ids if shown else [],
        }
        if self._num_choices > 1:
            fields["index"] = index
        if self._has_logprobs:
            fields["logprobs"] = (shown.logprobs if shown else None) or []
        if self._has_prompt:
            prompt = shown.prompt if shown else ()
            fields["prompt_logprobs"] = [PromptLogprob.of(token) for token in prompt]
        return fields


ROUTES: Final = Routes(router, (GenerateRequest, Generated, GeneratedChoices, GeneratedChunk))
