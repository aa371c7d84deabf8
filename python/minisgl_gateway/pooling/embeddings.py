"""POST /v1/embeddings: OpenAI's embeddings."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Final, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from minisgl.core import Finished
from minisgl.core.sampling import PoolingKind
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, TextPrompt
from minisgl.server.api.schema import Positive, token_prompt
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json, ignored
from minisgl.server.web import body
from minisgl_gateway.pooling.door import Door, PoolingFields, PromptUsage, check_count, rows_of


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
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        Meta(description="Cut longer texts to so many tokens; -1: to the most."),
    ] = None

    @property
    def prompts(self) -> list[Prompt]:
        """The texts. Raises InvalidRequest."""
        given = [self.input] if isinstance(self.input, str) else self.input
        if given and all(type(item) is int for item in given):
            return [token_prompt(given, "input")]
        check_count(len(given), "input")
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
        name, most = door.model.check(asked.model), asked.truncate_prompt_tokens
        pooling = door.recipe.embed(
            asked.prompts,
            prompt_name=asked.prompt_name,
            dimensions=asked.dimensions,
            pooling=asked.pooling,
            max_tokens=door.most_tokens if most == -1 else most,
        )
        is_text = asked.encoding_format == "base64"

        def make(ends: list[Finished]) -> Embeddings:
            vectors = pooling.vectors(rows_of(ends))
            data = [
                Embedding(
                    index=index,
                    embedding=base64.b64encode(vector).decode() if is_text else floats_of(vector),
                )
                for index, vector in enumerate(vectors)
            ]
            return Embeddings(data=data, model=name, usage=PromptUsage.of(ends))

        return await door.answer(request, asked, pooling, make, {"prompt": "input"})

    return routes


def floats_of(vector: bytes) -> list[float]:
    """Return a vector's numbers, from little-endian float32."""
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers


ROUTES: Final = Routes(router, (EmbeddingRequest, Embeddings))
