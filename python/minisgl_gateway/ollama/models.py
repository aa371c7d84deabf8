"""GET /api/tags, /api/ps and /api/version, POST /api/show: Ollama's lists of models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from minisgl.server import body
from minisgl.server.api.error_forms import OllamaError
from minisgl.server.api.strict import Json, ignored
from minisgl.server.openapi import operation
from minisgl.server.site import Routes, ServedModel, Site
from minisgl.version import __version__

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


def is_named(model: ServedModel, name: str) -> str:
    """Return the name for the answer, which may have Ollama's tag. Raises ModelNotFound."""
    if name not in model.names:
        model.check(name.removesuffix(":latest"))
    return name


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()
    modified_at = datetime.fromtimestamp(model.created, UTC).isoformat()

    def details() -> OllamaDetails:
        card = model.card
        return OllamaDetails(
            family=card.family,
            families=[card.family],
            parameter_size=card.size,
            quantization_level=(card.quantization or card.dtype).upper(),
            format=card.format,
        )

    def listed(**more: Any) -> Response:
        card = model.card
        entries = [
            OllamaModel(
                name=name,
                model=name,
                size=card.num_bytes,
                digest=card.digest,
                details=details(),
                **more,
            )
            for name in model.names
        ]
        return body.response(OllamaModels(models=entries))

    @routes.get("/api/tags", **operation(None, OllamaModels))
    async def tags() -> Response:
        """The served model under each of its names."""
        return listed(modified_at=modified_at)

    @routes.get("/api/ps", **operation(None, OllamaModels))
    async def ps() -> Response:
        """The served model under each of its names; it is always loaded."""
        return listed(expires_at=NEVER, context_length=frontend.context_length)

    @routes.get("/api/version", **operation(None, OllamaVersion))
    async def version() -> Response:
        """This server's version."""
        return body.response(OllamaVersion(version=__version__))

    @routes.post("/api/show", **operation(ShowRequest, OllamaShown, error=OllamaError))
    async def show(request: Request) -> Response:
        """The served model's template, sampling defaults and sizes."""
        asked = await body.read(request, ShowRequest, may_lack_type=True)
        name = is_named(model, asked.model or asked.name or model.name)
        card = model.card
        shown = [
            f"{'repeat_penalty' if name == 'repetition_penalty' else name} {value}"
            for name, value in model.shown_defaults.items()
        ]
        answer = OllamaShown(
            parameters="\n".join(shown),
            template=card.template,
            details=details(),
            model_info={
                "general.architecture": card.family,
                "general.parameter_count": card.num_parameters,
                f"{card.family}.context_length": frontend.context_length,
                **{f"{card.family}.{key}": value for key, value in card.shape.items()},
            },
            capabilities=card.capabilities,
            modified_at=modified_at,
            modelfile=f"FROM {name}",
        )
        return body.response(answer)

    return routes


ROUTES: Final = Routes(router, (OllamaModels, ShowRequest, OllamaShown, OllamaVersion))
