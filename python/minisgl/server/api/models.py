"""GET /v1/models: the served model, and the name that requests may call it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from fastapi import APIRouter, Response

from minisgl.core import SamplingParams
from minisgl.errors import ModelNotFound, brief
from minisgl.server.api.schema import Json
from minisgl.server.openapi import operation


class Model(Json, frozen=True, kw_only=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: Literal["minisgl"] = "minisgl"


class ModelList(Json, frozen=True, kw_only=True):
    data: list[Model]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """defaults: what a request gets that leaves a sampling parameter out. created: Unix time."""

    name: str
    defaults: SamplingParams
    created: int

    def check(self, name: str | None) -> None:
        """Raise ModelNotFound if a request means another model."""
        if name not in (None, self.name):
            raise ModelNotFound(
                f"the model {brief(name)} is not served here; this server serves {self.name!r}",
                param="model",
            )


RECORDS: Final = (ModelList,)
"""The roots of this family's schema in /openapi.json."""


def router(model: ServedModel) -> APIRouter:
    routes = APIRouter()
    entry = Model(id=model.name, created=model.created)

    @routes.get("/v1/models", **operation(None, ModelList))
    async def list_models() -> Response:
        """The served model, as a list of one."""
        body = msgspec.json.encode(ModelList(data=[entry]))
        return Response(body, media_type="application/json")

    @routes.get("/v1/models/{name:path}", **operation(None, Model))
    async def get_model(name: str) -> Response:
        """The served model, if that is its name."""
        model.check(name)
        return Response(msgspec.json.encode(entry), media_type="application/json")

    return routes
