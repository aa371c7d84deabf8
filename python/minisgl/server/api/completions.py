"""POST /v1/completions: OpenAI's text completions. Each prompt has `n` choices."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from minisgl.core import Finished, FinishReason
from minisgl.core.sampling import MAX_TOP_LOGPROBS
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, TextPrompt, TextReply
from minisgl.server.api.answers import OpenAIShape, TextLogprobs, Timings, Usage
from minisgl.server.api.schema import NonNegative, OpenAIFields, token_prompt
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json, only
from minisgl.server.web import body
from minisgl.server.web.respond import Output, event, respond

MAX_PROMPTS: Final = 1024  # in one call; several times the usual `--max-running-requests`


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[
        str | list[Any],
        Meta(
            description="A text, a list of texts, a list of token ids, or a list of such lists.",
            examples=["Once upon a time", ["One", "Two"], [1, 2, 3], [[1, 2], [3]]],
        ),
    ]
    best_of: Annotated[int | None, Meta(description="Must equal n.")] = None
    echo: Annotated[
        bool | None,
        Meta(description="Begin the text, and the log-probabilities, with the prompt's tokens."),
    ] = None
    max_tokens: NonNegative | None = None
    logprobs: Annotated[
        NonNegative | None, Meta(description="Report as many of the most likely tokens, at most 20")
    ] = None
    suffix: Annotated[
        str | None, only("", why="write the model's own fill-in-the-middle tokens into the prompt")
    ] = None

    # Clients of other engines send these.
    prompt_logprobs: Annotated[
        int | None,
        only(why="use echo with logprobs; chat completions and /generate have this field"),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="false: the prompt already has them, as a rendered chat template does."),
    ] = None

    def sampling_fields(self) -> dict[str, Any]:
        given = super().sampling_fields()
        if self.logprobs is not None and self.logprobs > MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {self.logprobs}",
                param="logprobs",
            )
        if self.echo:
            given["prompt_logprobs"] = self.logprobs
        if self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        return given

    @property
    def num_choices(self) -> int:
        """The number of choices per prompt. Raises InvalidRequest."""
        num_choices = self.n or 1
        if self.best_of not in (None, num_choices):
            raise InvalidRequest(
                f"best_of must equal n, which is {num_choices}, got {self.best_of}: ask for n "
                "choices and choose in the client",
                param="best_of",
            )
        return num_choices

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each once. Raises InvalidRequest."""
        if isinstance(self.prompt, str):
            return [self._text(self.prompt)]
        if not self.prompt:
            raise InvalidRequest("prompt must not be an empty list", param="prompt")
        if all(type(item) is int for item in self.prompt):
            return [token_prompt(self.prompt, "prompt")]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequest(
                f"at most {MAX_PROMPTS} prompts in one call, got {len(self.prompt)}", param="prompt"
            )
        if all(isinstance(item, str) for item in self.prompt):
            return [self._text(item) for item in self.prompt]
        if all(isinstance(item, list) for item in self.prompt):
            return [
                token_prompt(item, f"prompt[{index}]") for index, item in enumerate(self.prompt)
            ]
        raise InvalidRequest(
            "prompt must be a text, a list of texts, a list of token ids, or a list of lists of "
            "token ids, not a mixture",
            param="prompt",
        )

    def _text(self, text: str) -> TextPrompt:
        return TextPrompt(text=text, add_special_tokens=self.add_special_tokens is not False)


class TextChoice(Json, frozen=True, kw_only=True):
    """stop_reason: the stop string or stop token id that ended the answer, else null; in a stream
    only the choice's last chunk has it."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Json, frozen=True, kw_only=True):
    """A whole answer, or a chunk of a stream, which has one choice."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()

    @routes.post("/v1/completions", **operation(CompletionRequest, Completion, Completion))
    async def completions(request: Request) -> Response:
        """Continue texts or token ids; OpenAI's schema with a few extensions."""
        asked = await body.read(request, CompletionRequest)
        prompts = asked.prompts
        num_choices = asked.num_choices
        if len(prompts) * num_choices > MAX_PROMPTS:
            raise InvalidRequest(
                f"at most {MAX_PROMPTS} choices in one call, got {len(prompts)} prompts with n "
                f"{num_choices}",
                param="n",
            )
        name, has_logprobs = model.check(asked.model), asked.logprobs is not None
        shape = _CompletionShape("cmpl", name, asked, has_logprobs=has_logprobs)
        sampling, names = asked.params(model.defaults)
        return await respond(
            request,
            frontend,
            prompts,
            sampling,
            asked,
            shape=shape,
            names={"prompt": "prompt", **names},
            num_choices=num_choices,
        )

    return routes


class _CompletionShape(OpenAIShape):
    chunk_type = Completion
    nothing = ""

    def whole(self, outputs: list[Output]) -> Completion:
        choices = [
            self._text_choice(index, output.text, output.end, output)
            for index, output in enumerate(outputs)
        ]
        totals = self._totals([output.end for output in outputs])
        return Completion(**self._head, choices=choices, **totals)

    def text(self, index: int, reply: TextReply) -> bytes:
        self._count(reply)
        if self._has_details:
            return event(self._chunk(index, reply.text, reply=reply))
        return self._only_text(index, reply.text) if reply.text else b""

    def _logprobs_of(self, output: Output | TextReply) -> TextLogprobs:
        return TextLogprobs.of(output.tokens, output.logprobs or [], output.prompt)

    def _text_choice(
        self, index: int, text: str, end: Finished | None, shown: Output | TextReply | None
    ) -> TextChoice:
        ids = self._prompt_ids(index)
        return TextChoice(text=text, prompt_token_ids=ids, **self._choice(index, end, shown))

    def _text_chunk(self, index: int, text: str) -> Completion:
        return self._chunk(index, text)

    def _chunk(
        self, index: int, content: str, end: Finished | None = None, reply: TextReply | None = None
    ) -> Completion:
        choices = [self._text_choice(index, content, end, reply)]
        return Completion(**self._head, choices=choices, **self._so_far(end))


ROUTES: Final = Routes(router, (CompletionRequest, Completion))
