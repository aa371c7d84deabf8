"""What routes are built from: rows of the table `routes`, and the server that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
from fastapi import APIRouter

from minisgl.core import SamplingParams
from minisgl.errors import ModelNotFound
from minisgl.server.api.model_card import ModelCard, read_card
from minisgl.server.clients import Keys
from minisgl.server.frontend import Frontend
from minisgl.tokenizer.defaults import FOLLOWED
from minisgl.utils.text import brief


@dataclass(frozen=True, kw_only=True)  # no slots: `card` is kept in __dict__
class ServedModel:
    """The model of this server.

    names: requests may use any; answers to requests without one have the first. defaults: the
    sampling parameters of requests that leave them out. created: Unix time. folder: of the
    checkpoint.
    """

    names: tuple[str, ...]
    defaults: SamplingParams
    created: int
    folder: Path

    @property
    def name(self) -> str:
        return self.names[0]

    def check(self, name: str | None) -> str:
        """Return the name for the answer. Raises ModelNotFound if `name` is another model's."""
        if name is None:
            return self.name
        if name not in self.names:
            raise ModelNotFound(
                f"the model {brief(name)} is not served here; this server serves "
                f"{' and '.join(map(repr, self.names))}",
                param="model",
            )
        return name

    @property
    def shown_defaults(self) -> dict[str, float]:
        """The sampling parameters that a checkpoint may recommend, with their defaults."""
        return {name: getattr(self.defaults, name) for name in FOLLOWED}

    @cached_property
    def card(self) -> ModelCard:
        """The model's description. It is read from the checkpoint when it is first used."""
        return read_card(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The server that routes belong to. keys: None if every client may use it. open_ids: the
    X-Request-Ids of all requests that have no whole answer yet."""

    frontend: Frontend
    model: ServedModel
    keys: Keys | None
    open_ids: Container[str]


@dataclass(frozen=True, slots=True)
class Routes:
    """A family of routes. router: makes them. records: the roots of their schema in
    /openapi.json."""

    router: Callable[[Site], APIRouter]
    records: tuple[type[msgspec.Struct], ...] = ()
