"""What the doors have in common: the fields of requests, and the way to the model and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, NoReturn, Self, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import Meta

from minisgl import plugins
from minisgl.core import Finished
from minisgl.core.req import FloatArray
from minisgl.errors import CheckpointError, InvalidRequest
from minisgl.message.pooling import Pooling, ReadRecipe, Recipe
from minisgl.server.api.schema import Place, Salt, Timeout
from minisgl.server.errors import naming, refusal
from minisgl.server.frontend import Frontend
from minisgl.server.site import Site
from minisgl.server.strict import Json
from minisgl.server.web import body
from minisgl.server.web.respond import Output, Shape, respond
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

MAX_TEXTS: Final = 2048
"""In one call, as OpenAI has it. --max-queued-requests may allow fewer."""


Cut = Annotated[
    Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
    Meta(description="Cut longer texts to so many tokens, and of a pair the document; -1: to the "
    "most."),
]  # fmt: skip


class PoolingFields(Json, frozen=True, kw_only=True):
    """The fields that all requests have."""

    model: Annotated[
        str | None, Meta(description="The served model's name; left out, it is the served model.")
    ] = None
    timeout: Timeout = None
    priority: Place = None
    cache_salt: Salt = None

    stream: ClassVar[None] = None
    max_tokens_policy: ClassVar[None] = None


class PromptUsage(Json, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, ends: Sequence[Finished]) -> Self:
        num_tokens = sum(end.num_prompt_tokens for end in ends)
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)


class Door:
    """Mutable: it keeps the recipe of the checkpoint."""

    def __init__(self, site: Site) -> None:
        self.frontend: Frontend = site.frontend
        self.model = site.model

    @cached_property
    def recipe(self) -> Recipe:
        """How the checkpoint embeds. Raises InvalidRequest if it cannot be told here."""
        read: ReadRecipe | None = plugins.find("pooling", "recipe")
        if read is None:
            raise refusal(
                f"this endpoint {plugins.absent('pooling')}", status=501, code="not_supported"
            )
        try:
            return read(self.model.folder)
        except CheckpointError as error:
            logger.error("the model has no embeddings: %s", error)
            raise refusal(
                "the served model's files ask for a kind of embedding that this server does not "
                "compute; its log says which",
                status=501,
                code="not_supported",
            ) from error

    async def answer(
        self,
        request: Request,
        asked: PoolingFields,
        pooling: Pooling[T],
        make: Callable[[T, PromptUsage], msgspec.Struct],
        names: Mapping[str, str],
    ) -> Response:
        """Let the model compute the prompts. make: makes the answer from what they yield. names:
        the request's names of fields, by "prompt" and those of `Pooling.about`."""

        shape = _Ends()
        with naming(names), pooling.naming():
            response = await respond(
                request,
                self.frontend,
                pooling.prompts,
                pooling.sampling,
                asked,
                shape=shape,
                names={},
            )

        def made() -> bytes:
            rows = pooling.finish([end.pooled for end in shape.ends])
            return msgspec.json.encode(make(rows, PromptUsage.of(shape.ends)))

        # In a thread, because millions of numbers take seconds.
        is_answered = response.status_code == 200
        return body.json(await asyncio.to_thread(made)) if is_answered else response


class _Ends(Shape):
    """Keeps the ends of prompts, of which an answer is made. It is never a stream."""

    ends: Sequence[Finished] = ()

    def whole(self, outputs: list[Output]) -> msgspec.Struct:
        self.ends = [output.end for output in outputs]
        return PromptUsage.of(self.ends)

    def text(self, index: int, reply: object) -> NoReturn:
        raise AssertionError("embeddings are no stream")

    def end(self, index: int, end: Finished) -> NoReturn:
        raise AssertionError("embeddings are no stream")


def as_json(x_D: FloatArray) -> Any:
    """Return a row of an answer. Rows are encoded one by one, so that other threads run between
    them."""
    return msgspec.Raw(msgspec.json.encode(x_D.tolist()))


def counted_texts(texts: list[T], name: str) -> list[T]:
    """Return the texts. Raises InvalidRequest for none, or too many."""
    if not 1 <= (count := len(texts)) <= MAX_TEXTS:
        raise InvalidRequest(f"{name} must have 1 to {MAX_TEXTS} items, got {count}", param=name)
    return texts


def listed(texts: str | list[T]) -> list[str] | list[T]:
    return [texts] if isinstance(texts, str) else texts
