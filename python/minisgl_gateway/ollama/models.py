"""GET /api/tags, /api/ps and /api/version, POST /api/show: Ollama's lists of models."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from minisgl.server.errors import refusal
from minisgl.server.site import operation
from minisgl.server.strict import Json, ignored
from minisgl.server.web import body
from minisgl.version import __version__
from minisgl_gateway.card import ModelCard
from minisgl_gateway.chat import Chat, Model
from minisgl_gateway.error_forms import OllamaError
from minisgl_gateway.in_process import in_process

NEVER: Final = "9999-12-31T23:59:59Z"
"""The value of `expires_at`, when Ollama would unload a model."""


class OllamaDetails(Json, frozen=True, kw_only=True):
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    format: Literal["safetensors", "gguf"]
    parent_model: Literal[""] = ""


class OllamaModel(Json, frozen=True, kw_only=True, omit_defaults=True):
    """modified_at: in /api/tags. expires_at, context_length: in /api/ps."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    context_length: int | UnsetType | None = UNSET


class OllamaModels(Json, frozen=True, kw_only=True):
    models: list[OllamaModel]


class ShowRequest(Json, frozen=True, kw_only=True):
    """POST /api/show"""

    model: str | None = None
    name: str | None = None
    verbose: Annotated[bool | None, ignored("Changes nothing.")] = None


class OllamaShown(Json, frozen=True, kw_only=True):
    """parameters: the sampling defaults, one per line."""

    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int | None]
    capabilities: list[str]
    modified_at: str
    modelfile: str


class OllamaVersion(Json, frozen=True, kw_only=True):
    version: str


def own_name(name: str, names: Collection[str]) -> str:
    """Return the name without Ollama's tag, unless it is one of `names` as it is."""
    return name if name in names else name.removesuffix(":latest")


async def named(chat: Chat, request: Request, name: str) -> Model:
    """Return the model of this name, which may have Ollama's tag. Raises ModelNotFound."""
    names = [model.name for model in await chat.models(request)]
    return await chat.model(request, own_name(name, names))


def _details(card: ModelCard) -> OllamaDetails:
    return OllamaDetails(
        family=card.family,
        families=[card.family],
        parameter_size=card.size,
        quantization_level=(card.quantization or card.dtype).upper(),
        format=card.format,
    )


def _listed(model: Model, card: ModelCard, **more: Any) -> OllamaModel:
    return OllamaModel(
        name=model.name,
        model=model.name,
        size=card.num_bytes,
        digest=card.digest,
        details=_details(card),
        **more,
    )


def _modified_at(model: Model) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat()


def router(chat: Chat) -> APIRouter:
    routes = APIRouter()

    @routes.get("/api/tags", **operation(None, OllamaModels))
    async def tags(request: Request) -> Response:
        """The served model under each of its names."""
        models = await chat.models(request)
        entries = [_listed(model, chat.card, modified_at=_modified_at(model)) for model in models]
        return body.response(OllamaModels(models=entries))

    @routes.get("/api/ps", **operation(None, OllamaModels))
    async def ps(request: Request) -> Response:
        """The served model under each of its names; it is always loaded."""
        entries = [
            _listed(model, chat.card, expires_at=NEVER, context_length=model.context_length)
            for model in await chat.models(request)
        ]
        return body.response(OllamaModels(models=entries))

    @routes.get("/api/version", **operation(None, OllamaVersion))
    async def version() -> Response:
        """This server's version."""
        return body.response(OllamaVersion(version=__version__))

    @routes.post("/api/show", **operation(ShowRequest, OllamaShown, error=OllamaError))
    async def show(request: Request) -> Response:
        """The served model's template, sampling defaults and sizes."""
        asked = await body.read(request, ShowRequest, may_lack_type=True)
        name = asked.model or asked.name
        model = await (named(chat, request, name) if name else chat.model(request, None))
        card = chat.card
        shown = [
            f"{'repeat_penalty' if key == 'repetition_penalty' else key} {value}"
            for key, value in model.defaults.items()
        ]
        answer = OllamaShown(
            parameters="\n".join(shown),
            template=model.template,
            details=_details(card),
            model_info={
                "general.architecture": card.family,
                "general.parameter_count": card.num_parameters,
                f"{card.family}.context_length": model.context_length,
                **{f"{card.family}.{key}": value for key, value in card.shape.items()},
            },
            capabilities=model.capabilities,
            modified_at=_modified_at(model),
            modelfile=f"FROM {name or model.name}",
        )
        return body.response(answer)

    @routes.post("/api/pull", include_in_schema=False)
    @routes.post("/api/push", include_in_schema=False)
    @routes.post("/api/create", include_in_schema=False)
    @routes.post("/api/copy", include_in_schema=False)
    @routes.delete("/api/delete", include_in_schema=False)
    async def refuse(request: Request) -> Response:
        """Say how this server gets another model."""
        raise refusal(
            f"{request.url.path} is not supported here: a server has the model that it was started "
            "with; `minisgl pull` downloads another, `minisgl upgrade -- --model NAME` serves it",
            status=404, code="not_found",
        )  # fmt: skip

    return routes


ROUTES: Final = in_process(router, (OllamaModels, ShowRequest, OllamaShown, OllamaVersion))
