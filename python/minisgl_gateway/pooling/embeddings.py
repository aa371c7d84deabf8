"""POST /v1/embeddings: OpenAI's embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from minisgl.core.req import FloatArray
from minisgl.core.sampling import PoolingKind
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, TextPrompt
from minisgl.server.api.schema import Positive, token_prompt
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json, ignored
from minisgl.server.web import body
from minisgl_gateway.pooling.door import (
    Cut,
    Door,
    PoolingFields,
    PromptUsage,
    as_json,
    counted_texts,
    listed,
)


class EmbeddingRequest(PoolingFields, frozen=True, kw_only=True):
    """POST /v1/embeddings"""

    input: Annotated[
        str | list[Any],
        Meta(
            description="A text, a list of texts, a list of token ids, or a list of such lists.",
            examples=["Hello", ["One", "Two"], [1, 2, 3], [[1, 2], [3]]],
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64: of little-endian float32.")
    ] = None
    dimensions: Annotated[
        Positive | None, Meta(description="Keep so many, the first ones, and normalise again.")
    ] = None
    user: Annotated[str | None, ignored("Changes nothing.")] = None

    # Extensions, named as in text-embeddings-inference and vLLM.
    prompt_name: Annotated[
        str | None,
        Meta(description="Put the checkpoint's prompt of this name before each text (query)."),
    ] = None
    pooling: Annotated[PoolingKind | None, Meta(description="Instead of the checkpoint's.")] = None
    truncate_prompt_tokens: Cut = None

    @property
    def prompts(self) -> list[Prompt]:
        """The texts. Raises InvalidRequest."""
        given = listed(self.input)
        if set(map(type, given)) == {int}:
            return [token_prompt(given, "input")]
        counted_texts(given, "input")
        if all(isinstance(item, str) for item in given):
            return [TextPrompt(text=item) for item in given]
        if all(isinstance(item, list) for item in given):
            return [token_prompt(item, f"input[{index}]") for index, item in enumerate(given)]
        raise InvalidRequest(
            "input must be a text, a list of texts, a list of token ids, or a list of lists of "
            "token ids, not a mixture",
            param="input",
        )


class Embedding(Json, frozen=True, kw_only=True):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(Json, frozen=True, kw_only=True):
    """id: the request's. OpenAI's answers have none; Mistral's client needs one."""

    id: str
    data: list[Embedding]
    model: str
    usage: PromptUsage
    object: Literal["list"] = "list"


def router(site: Site) -> APIRouter:
    door, routes = Door(site), APIRouter()

    @routes.post("/v1/embeddings", **operation(EmbeddingRequest, Embeddings))
    async def embeddings(request: Request) -> Response:
        """Embed texts or token ids; OpenAI's schema with a few extensions."""
        asked = await body.read(request, EmbeddingRequest)
        name = door.model.check(asked.model)
        # In a thread, because there may be a million token ids.
        pooling = await asyncio.to_thread(
            lambda: door.recipe.embed(
                asked.prompts,
                prompt_name=asked.prompt_name,
                dimensions=asked.dimensions,
                pooling=asked.pooling,
                max_tokens=asked.truncate_prompt_tokens,
                context=door.frontend.context_length,
            )
        )
        is_text = asked.encoding_format == "base64"

        def make(x_ND: FloatArray, usage: PromptUsage) -> Embeddings:
            forms = [
                base64.b64encode(x_D.tobytes()).decode() if is_text else as_json(x_D)
                for x_D in x_ND
            ]
            data = [Embedding(index=index, embedding=form) for index, form in enumerate(forms)]
            return Embeddings(id=request.scope["request_id"], data=data, model=name, usage=usage)

        return await door.answer(request, asked, pooling, make, {"prompt": "input"})

    return routes


ROUTES: Final = Routes(router, (EmbeddingRequest, Embeddings))
