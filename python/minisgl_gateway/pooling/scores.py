"""POST /rerank, /v1/rerank and /v2/rerank: Cohere's and Jina's form. POST /v1/score: vLLM's."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from minisgl.errors import InvalidRequest
from minisgl.message.pooling import Pooling
from minisgl.server.api.schema import Positive
from minisgl.server.errors import naming
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json, only
from minisgl.server.web import body
from minisgl_gateway.pooling.door import (
    Cut,
    Door,
    PoolingFields,
    PromptUsage,
    counted_texts,
    listed,
)


class _RankFields(PoolingFields, frozen=True, kw_only=True):
    instruction: Annotated[
        str | None,
        Meta(description="What counts as relevant, for a reranker that reads it; others do not."),
    ] = None
    truncate_prompt_tokens: Cut = None


class Document(Json, frozen=True, kw_only=True):
    text: str


class RerankRequest(_RankFields, frozen=True, kw_only=True):
    """POST /rerank"""

    query: str
    documents: list[str | Document]
    top_n: Annotated[
        Positive | None, Meta(description="Return so many results, the best ones.")
    ] = None
    return_documents: Annotated[
        bool | None, Meta(description="true: each result has its document.")
    ] = None
    max_tokens_per_doc: Annotated[int | None, only(why="cut the documents in the client")] = None
    max_chunks_per_doc: Annotated[int | None, only(1, why="cut the documents in the client")] = None
    rank_fields: Annotated[list[str] | None, only(["text"], why="documents have a text alone")] = (
        None
    )


class Ranked(Json, frozen=True, kw_only=True):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Reranked(Json, frozen=True, kw_only=True):
    """results: the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PromptUsage
    meta: dict[str, Any]


class ScoreRequest(_RankFields, frozen=True, kw_only=True):
    """POST /v1/score"""

    text_1: Annotated[str | list[str], Meta(description="A query, or one for each text of text_2.")]
    text_2: Annotated[str | list[str], Meta(description="The documents.")]


class Score(Json, frozen=True, kw_only=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(Json, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage
    object: Literal["list"] = "list"


def router(site: Site) -> APIRouter:
    door, routes = Door(site), APIRouter()

    async def ranked(
        queries: list[str], texts: list[str], asked: _RankFields
    ) -> Pooling[list[float]]:
        repeated = len(asked.instruction or "") + (len(queries[0]) if len(queries) == 1 else 0)
        if (num_chars := repeated * len(texts)) > body.MAX_BODY_BYTES:
            raise InvalidRequest(
                f"the query stands beside each of {len(texts):,} documents, with the instruction: "
                f"{num_chars:,} characters, and at most {body.MAX_BODY_BYTES:,} are read; shorten "
                "it, or send fewer documents",
                param="query",
            )
        # In a thread, because the first call may read a vocabulary of 10 MB.
        return await asyncio.to_thread(
            door.recipe.rank,
            queries,
            texts,
            instruction=asked.instruction,
            max_tokens=asked.truncate_prompt_tokens,
            context=door.frontend.context_length,
        )

    @routes.post("/v2/rerank", **operation(RerankRequest, Reranked))
    @routes.post("/v1/rerank", **operation(RerankRequest, Reranked))
    @routes.post("/rerank", **operation(RerankRequest, Reranked))
    async def rerank(request: Request) -> Response:
        """Order documents by their relevance for a query; Cohere's and Jina's schema."""
        asked = await body.read(request, RerankRequest)
        name = door.model.check(asked.model)
        given = [each if isinstance(each, str) else each.text for each in asked.documents]
        texts = counted_texts(given, "documents")
        pooling = await ranked([asked.query], texts, asked)

        def make(scores: list[float], usage: PromptUsage) -> Reranked:
            best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
            shown = asked.return_documents
            return Reranked(
                id=f"rerank-{uuid.uuid4().hex}",
                model=name,
                results=[
                    Ranked(
                        index=index,
                        relevance_score=scores[index],
                        document=Document(text=texts[index]) if shown else UNSET,
                    )
                    for index in best[: asked.top_n]
                ],
                usage=usage,
                meta={"api_version": {"version": "2"}},
            )

        return await door.answer(request, asked, pooling, make, {})

    @routes.post("/v1/score", **operation(ScoreRequest, Scores))
    @routes.post("/score", **operation(ScoreRequest, Scores))
    async def score(request: Request) -> Response:
        """Score documents for a query, or pairs of texts; vLLM's schema."""
        asked = await body.read(request, ScoreRequest)
        name = door.model.check(asked.model)
        texts = counted_texts(listed(asked.text_2), "text_2")
        names = {"query": "text_1", "documents": "text_2"}
        with naming(names):
            pooling = await ranked(listed(asked.text_1), texts, asked)

        def make(scores: list[float], usage: PromptUsage) -> Scores:
            return Scores(
                id=f"score-{uuid.uuid4().hex}",
                created=int(time.time()),
                model=name,
                data=[Score(index=index, score=value) for index, value in enumerate(scores)],
                usage=usage,
            )

        return await door.answer(request, asked, pooling, make, names)

    return routes


ROUTES: Final = Routes(router, (RerankRequest, Reranked, ScoreRequest, Scores))
