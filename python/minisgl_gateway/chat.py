"""What the doors of other vendors' APIs ask, and how they get the answer.

A door makes a vendor's request into a request to chat completions, and writes the answer in the
vendor's form::

    body -> Asked -> Chat.answer -> parts of the answer, then an End -> Form -> body or events

There are two `Chat`s: `minisgl_gateway.in_process` asks the server of this process, without a
socket; `minisgl_gateway.upstream` asks any server of OpenAI's API by HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec
from fastapi import Request, Response

from minisgl.core.answer import Abilities, Part
from minisgl.server.api.answers import Timings, TokenLogprob, Usage
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.left_out import Omission
from minisgl.server.api.messages import ImagePart
from minisgl.server.web.errors import ErrorBody
from minisgl.server.web.respond import event
from minisgl_gateway.card import ModelCard


def named_event(name: str, body: msgspec.Struct) -> bytes:
    """Return a server-sent event with a name, whose data is `body` as JSON."""
    return b"event: %b\n%b" % (name.encode(), event(body))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request in the form of chat completions.

    text: a prompt without chat template, which is continued instead of `chat.messages`. names: the
    vendor's names of fields, by their names in chat completions; "prompt" stands for the messages.
    left_out: named in a header of the answer.
    """

    chat: ChatRequest
    names: Mapping[str, str]
    text: str | None = None
    left_out: Sequence[Omission] = ()

    @property
    def all_names(self) -> dict[str, str]:
        """`names`, and images[N] for the request's picture N, counted from 0: its place in the
        messages is not the one that it has in the vendor's request."""
        places = [
            f"messages[{index}].content[{at}]"
            for index, message in enumerate(self.chat.messages)
            for at, part in enumerate(message.content if isinstance(message.content, list) else ())
            if isinstance(part, ImagePart)
        ]
        urls = {f"{place}.image_url.url": f"images[{n}]" for n, place in enumerate(places)}
        return {**urls, **{place: f"images[{n}]" for n, place in enumerate(places)}, **self.names}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of an answer. stop: the stop string or token id that ended it."""

    is_cut: bool
    stop: str | int | None
    usage: Usage
    timings: Timings | msgspec.UnsetType

    @property
    def num_cached(self) -> int:
        details = self.usage.prompt_tokens_details
        return details.cached_tokens if details else 0

    @property
    def num_reasoning(self) -> int:
        details = self.usage.completion_tokens_details
        return details.reasoning_tokens if details else 0


class Form(ABC):
    """How a door writes its answers. logprobs: empty unless the request asks for them."""

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    """The content type of a stream."""

    begins_with_count: ClassVar[bool] = False
    """Whether `opening` needs the number of the prompt's tokens."""

    @abstractmethod
    def whole(
        self, parts: Sequence[Part], logprobs: list[TokenLogprob], end: End
    ) -> msgspec.Struct:
        """The response body. logprobs: of all tokens of the answer."""

    def opening(self, num_prompt_tokens: int) -> bytes:
        """The events before the first text. num_prompt_tokens: 0 if they are not known yet."""
        return b""

    @abstractmethod
    def text(self, parts: Sequence[Part], logprobs: list[TokenLogprob]) -> bytes:
        """The events for more output, of which there may be none."""

    @abstractmethod
    def end(self, end: End) -> bytes:
        """The events after all output."""

    @abstractmethod
    def failure(self, error: ErrorBody) -> bytes:
        """The last event of a stream that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that a request may name.

    template: of chats; "" if it is unknown. has_efforts: whether `reasoning_effort` has an effect.
    created: Unix time. defaults: of sampling parameters.
    takes_all: its server takes fields of chat completions that OpenAI does not have.
    """

    name: str
    template: str
    abilities: Abilities
    has_efforts: bool
    capabilities: list[str]
    context_length: int | None
    created: int
    defaults: Mapping[str, float] = field(default_factory=dict)
    takes_all: bool = True

    def given_or_default(self, parameter: str, given: float | None) -> float:
        """Return the sampling parameter of a request; OpenAI's default is 1."""
        return self.defaults.get(parameter, 1.0) if given is None else given


class Chat(Protocol):
    """A server of chat completions. Each method raises RequestError or EngineError."""

    @property
    def card(self) -> ModelCard:
        """The description of the models' files; what an upstream does not say is "" or 0."""

    async def models(self, request: Request) -> Sequence[Model]:
        """Return the served models. There is at least one."""

    async def model(self, request: Request, name: str | None) -> Model:
        """Return the model of this name; for None the first. `Model.name` is the given name.

        Raises ModelNotFound.
        """

    async def answer(self, request: Request, asked: Asked, form: Form) -> Response:
        """Return the response in `form`, whole or as a stream (`ChatRequest.stream`)."""

    async def count_tokens(self, request: Request, chat: ChatRequest) -> int:
        """Return the number of tokens of the prompt."""

    def owner(self, request: Request) -> str:
        """Return a name of the request's API key, or "". Others may not read what it keeps."""


def fitting(
    chat: ChatRequest, model: Model, names: Mapping[str, str], default_effort: str = ""
) -> tuple[ChatRequest, list[Omission]]:
    """Return the request without the reasoning settings that the chat template does not support,
    and the omissions.

    names: as in `Asked`. default_effort: an effort that is left out without a warning.
    """
    left_out: list[str] = []
    if chat.reasoning_effort is not None and not model.has_efforts:
        if chat.reasoning_effort != default_effort:
            left_out.append("reasoning_effort")
        chat = msgspec.structs.replace(chat, reasoning_effort=None)
    if chat.thinking_budget is not None and not model.abilities.has_reasoning:
        left_out.append("thinking_budget")
        chat = msgspec.structs.replace(chat, thinking_budget=None)
    return chat, [Omission(names[name], names[name]) for name in left_out]
