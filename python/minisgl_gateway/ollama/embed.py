"""POST /api/embed, and /api/embeddings of older clients: Ollama's embeddings."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from minisgl.core.req import FloatArray
from minisgl.message import TextPrompt
from minisgl.server.api.schema import Positive
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json, ignored
from minisgl.server.web import body
from minisgl_gateway.error_forms import OllamaError
from minisgl_gateway.ollama.models import own_name
from minisgl_gateway.ollama.request import OllamaOptions
from minisgl_gateway.pooling.door import (
    Door,
    PoolingFields,
    PromptUsage,
    as_json,
    counted_texts,
    listed,
)


class _Request(PoolingFields, frozen=True, kw_only=True):
    model: str
    options: Annotated[OllamaOptions | None, ignored("Changes nothing: nothing is sampled.")] = None
    keep_alive: Annotated[Any, ignored("Changes nothing: the model stays loaded.")] = None


R = TypeVar("R", bound=_Request)


class OllamaEmbedRequest(_Request, frozen=True, kw_only=True):
    """POST /api/embed"""

    input: str | list[str] = ""
    truncate: Annotated[
        bool | None, Meta(description="Left out: true, longer texts are cut to the context.")
    ] = None
    dimensions: Positive | None = None


class OllamaEmbedded(Json, frozen=True, kw_only=True):
    """Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaEmbeddingsRequest(_Request, frozen=True, kw_only=True):
    """POST /api/embeddings"""

    prompt: str = ""


class OllamaEmbedding(Json, frozen=True, kw_only=True):
    embedding: list[float]


def router(site: Site) -> APIRouter:
    door, routes = Door(site), APIRouter()

    def named(asked: R) -> R:
        """Return the request with the model's own name, which may have Ollama's tag in it."""
        known = own_name(asked.model, door.model.all_names)
        return msgspec.structs.replace(asked, model=door.model.check(known))

    @routes.post("/api/embed", **operation(OllamaEmbedRequest, OllamaEmbedded, error=OllamaError))
    async def embed(request: Request) -> Response:
        """Embed texts; Ollama's schema."""
        began = time.perf_counter()
        given = await body.read(request, OllamaEmbedRequest, may_lack_type=True)
        asked = named(given)
        texts = listed(asked.input)
        if texts in ([], [""]):  # asks only whether the model is loaded
            return body.response(OllamaEmbedded(model=given.model, embeddings=[]))
        pooling = door.recipe.embed(
            [TextPrompt(text=text) for text in counted_texts(texts, "input")],
            dimensions=asked.dimensions,
            max_tokens=None if asked.truncate is False else -1,
            context=door.frontend.context_length,
        )

        def make(x_ND: FloatArray, usage: PromptUsage) -> OllamaEmbedded:
            return OllamaEmbedded(
                model=given.model,
                embeddings=[as_json(x_D) for x_D in x_ND],
                total_duration=round((time.perf_counter() - began) * 1e9),
                prompt_eval_count=usage.prompt_tokens,
            )

        return await door.answer(request, asked, pooling, make, {"prompt": "input"})

    @routes.post(
        "/api/embeddings", **operation(OllamaEmbeddingsRequest, OllamaEmbedding, error=OllamaError)
    )
    async def embeddings(request: Request) -> Response:
        """Embed a text, as Ollama did before /api/embed."""
        asked = named(await body.read(request, OllamaEmbeddingsRequest, may_lack_type=True))
        if not asked.prompt:
            return body.response(OllamaEmbedding(embedding=[]))
        pooling = door.recipe.embed(
            [TextPrompt(text=asked.prompt)], max_tokens=-1, context=door.frontend.context_length
        )

        def make(x_ND: FloatArray, _: PromptUsage) -> OllamaEmbedding:
            return OllamaEmbedding(embedding=x_ND[0].tolist())

        return await door.answer(request, asked, pooling, make, {})

    return routes


ROUTES: Final = Routes(
    router,
    (OllamaEmbedRequest, OllamaEmbedded, OllamaEmbeddingsRequest, OllamaEmbedding, OllamaError),
)
