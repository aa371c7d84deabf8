"""GET /v1/models: the served model under each of its names, and its adapters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

from fastapi import APIRouter, Response
from msgspec import UNSET, UnsetType

from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json
from minisgl.server.web import body


class Model(Json, frozen=True, kw_only=True):
    """A model in OpenAI's form, with the fields of Anthropic's.

    context_length: the most tokens of prompt and answer; null while the model loads. max_model_len:
    the same, under vLLM's name. has_chat_template: false for a base model, or a broken template:
    texts are completed, and messages refused. has_thinking_switch: whether `enable_thinking` has an
    effect. has_efforts: whether `reasoning_effort` has one.
    sampling_defaults: the parameters of requests that leave them out. parent: of a LoRA adapter,
    the model that it adapts.
    """

    id: str
    created: int
    context_length: int | None
    max_model_len: int | None
    capabilities: list[str]
    has_chat_template: bool
    has_thinking_switch: bool
    has_efforts: bool
    sampling_defaults: dict[str, float]
    display_name: str
    created_at: str
    object: Literal["model"] = "model"
    owned_by: Literal["minisgl"] = "minisgl"
    type: Literal["model"] = "model"
    parent: str | UnsetType = UNSET


class ModelList(Json, frozen=True, kw_only=True):
    data: list[Model]
    first_id: str
    last_id: str
    object: Literal["list"] = "list"
    has_more: Literal[False] = False


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()

    def entry(name: str) -> Model:
        return Model(
            id=name,
            created=model.created,
            context_length=frontend.context_length,
            max_model_len=frontend.context_length,
            capabilities=model.capabilities,
            has_chat_template=frontend.info.get("has_chat_template", bool(model.template)),
            has_thinking_switch=model.abilities.has_switch,
            has_efforts=model.has_efforts,
            sampling_defaults=model.shown_defaults,
            display_name=name,
            parent=model.name if name in model.adapters else UNSET,
            created_at=datetime.fromtimestamp(model.created, UTC).isoformat(),
        )

    @routes.get("/v1/models", **operation(None, ModelList))
    async def list_models() -> Response:
        """The served model, once for each of its names, and its adapters."""
        entries = [entry(name) for name in model.all_names]
        listed = ModelList(data=entries, first_id=entries[0].id, last_id=entries[-1].id)
        return body.response(listed)

    @routes.get("/v1/models/{name:path}", **operation(None, Model))
    async def get_model(name: str) -> Response:
        """The served model, or an adapter. 404 if nothing has this name."""
        return body.response(entry(model.check(name)))

    return routes


ROUTES: Final = Routes(router, (ModelList,))
