"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: names of adapters, at run time.

The paths and fields are vLLM's. A name is loaded when every rank of this machine has checked that
its engine can use the adapter. Requests keep the adapter that their name meant when they came, so
to unload or to replace a name stops none.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from minisgl import plugins
from minisgl.core.adapters import Adapter, are_adapters
from minisgl.errors import ConfigError, EngineError, InvalidRequest, ModelNotFound
from minisgl.message import AdapterMsg, AdapterReply
from minisgl.server.errors import refusal
from minisgl.server.frontend import Frontend
from minisgl.server.model import ServedModel
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json, ignored
from minisgl.server.web import body
from minisgl.utils.logger import get_logger
from minisgl.utils.text import brief

logger = get_logger(__name__)

LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"
ADAPTER_PATHS: Final = (LOAD, UNLOAD)

CHECK_TIMEOUT_S: Final = 60.0
"""The longest wait for the ranks: they answer between two steps."""
MAX_ADAPTERS: Final = 10_000
"""The most names. Each is a line of /v1/models."""


class LoadRequest(Json, frozen=True, kw_only=True):
    lora_name: str
    lora_path: Annotated[str, Meta(description="A folder below --lora-folder.")]
    load_inplace: Annotated[
        bool, Meta(description="Whether the name may mean another adapter from now on.")
    ] = False


class UnloadRequest(Json, frozen=True, kw_only=True):
    lora_name: str
    lora_int_id: Annotated[int | None, ignored("Changes nothing: a name is enough.")] = None


class AdapterAnswer(Json, frozen=True, kw_only=True):
    """digest: SHA-256 of the adapter's files."""

    lora_name: str
    digest: str
    status: Literal["loaded", "unloaded"]


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()

    @routes.post(LOAD, **operation(LoadRequest, AdapterAnswer))
    async def load(request: Request) -> Response:
        """Load a LoRA adapter, which requests then choose by the model `lora_name`."""
        asked = await body.read(request, LoadRequest)
        name = asked.lora_name
        folder = _folder_of(model, asked)
        try:
            read = plugins.need("adapters", "read", "--lora-folder")
            adapter: Adapter = await asyncio.to_thread(read, folder)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="lora_path") from error
        _check_name(model, asked, adapter)
        await _check(frontend, adapter)
        _check_name(model, asked, adapter)  # it may have been loaded meanwhile
        model.adapters[name] = adapter
        logger.info("the adapter %s is loaded from %s", name, folder)
        return body.response(AdapterAnswer(lora_name=name, digest=adapter.digest, status="loaded"))

    @routes.post(UNLOAD, **operation(UnloadRequest, AdapterAnswer))
    async def unload(request: Request) -> Response:
        """Forget an adapter. Its running requests finish."""
        name = (await body.read(request, UnloadRequest)).lora_name
        adapter = model.adapters.pop(name, None)
        if adapter is None:
            raise ModelNotFound(
                f"no adapter is called {brief(name)}; GET /v1/models lists them", param="lora_name"
            )
        logger.info("the adapter %s is unloaded", name)
        return body.response(
            AdapterAnswer(lora_name=name, digest=adapter.digest, status="unloaded")
        )

    return routes


def _folder_of(model: ServedModel, asked: LoadRequest) -> Path:
    """Return the adapter's folder. Raises InvalidRequest unless it may be loaded."""
    root, name = model.lora_folder, asked.lora_name
    if root is None:
        raise refusal(
            "this server loads no adapters at run time; start it with --lora-folder DIR",
            status=403,
            code="not_permitted",
        )
    if not are_adapters({name: asked.lora_path or "."}):
        raise InvalidRequest(
            "lora_name must be 1 to 128 printable characters without =", param="lora_name"
        )
    if name in model.names:
        raise InvalidRequest(f"{name!r} is the model's name; choose another", param="lora_name")
    outside = refusal(
        "lora_path must be a folder below --lora-folder, and so must its files",
        status=403,
        code="not_permitted",
        param="lora_path",
    )
    try:
        folder = (root / asked.lora_path).resolve()
        is_inside = folder.is_relative_to(root) and all(
            path.resolve().is_relative_to(root) for path in folder.iterdir()
        )
    except (OSError, ValueError, RuntimeError) as error:  # no folder, a null byte, a ring of links
        raise outside from error
    if not is_inside:
        raise outside
    return folder


def _check_name(model: ServedModel, asked: LoadRequest, adapter: Adapter) -> None:
    """Raise InvalidRequest if the name means another adapter that must stay, or is one too many."""
    before = model.adapters.get(asked.lora_name)
    if before is None and len(model.adapters) >= MAX_ADAPTERS:
        raise InvalidRequest(f"{MAX_ADAPTERS} adapters are loaded; unload one", param="lora_name")
    if before and before.digest != adapter.digest and not asked.load_inplace:
        raise InvalidRequest(
            f"{asked.lora_name!r} is another adapter; unload it first, or send load_inplace",
            param="lora_name",
        )


async def _check(frontend: Frontend, adapter: Adapter) -> None:
    """Raise the refusal of a rank, or EngineError if one does not answer."""
    trips = frontend.round_trips
    message = AdapterMsg(seq=trips.new_seq(), adapter=adapter)
    answers = await trips.ask(message, trips.num_ranks, CHECK_TIMEOUT_S)
    for answer in answers:
        if isinstance(answer, AdapterReply) and answer.failed:
            raise answer.failed.to_error()
    if len(answers) < trips.num_ranks:
        raise EngineError(f"no answer from the engine within {CHECK_TIMEOUT_S:g} s")


ROUTES: Final = Routes(router, (LoadRequest, UnloadRequest, AdapterAnswer))
