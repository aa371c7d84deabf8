"""A LoRA adapter as requests, plans and messages name it (docs/decisions/0059).

LoRA: Hu et al., 2021. An adapter adds B A x * scale to linear layers of the model, its *parent*.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from minisgl import plugins
from minisgl.errors import ModelNotFound
from minisgl.utils.text import brief

MAX_ADAPTER_NAME: Final = 128
_MARK: Final = "\0" * 257
"""Longer than any namespace that a client can ask for, so that none is an adapter's."""


class Adapter(NamedTuple):
    """digest: SHA-256 of the adapter's files, as hex digits. folder: where they are."""

    digest: str
    folder: str

    def namespace(self, outer: str) -> str:
        """Return the namespace of the prefix cache for this adapter within the namespace `outer`.
        Files that have changed are another adapter."""
        return f"{_MARK}{self.digest}{outer}"


Adapters = Mapping[str, Adapter]
"""The adapters that requests may name."""


class AdapterLoad(NamedTuple):
    """An adapter to put into a slot of the device before a step."""

    slot: int
    adapter: Adapter


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Return (name, folder or id) of NAME=PATH_OR_ID. Raises ValueError."""
    name, equals, place = text.partition("=")
    if not equals:
        raise ValueError(text)
    return [(name.strip(), place.strip())]


def are_adapters(value: Any) -> bool:
    """Return whether `value` has names of adapters with their folders or ids, as a mapping or as
    pairs, and no name twice."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not pairs:
        return False
    return all(map(_is_pair, pairs)) and len(dict(pairs)) == len(pairs)


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    name, place = pair
    are_texts = isinstance(name, str) and isinstance(place, str) and name != "" != place
    return are_texts and len(name) <= MAX_ADAPTER_NAME and name.isprintable() and "=" not in name


def adapter_of(name: str, adapters: Adapters, param: str) -> Adapter:
    """Return the adapter of this name. Raises ModelNotFound."""
    if not isinstance(name, str) or name not in adapters:
        known = ", ".join(map(repr, adapters)) or "none"
        raise ModelNotFound(f"no adapter is called {brief(name)}; loaded: {known}", param=param)
    return adapters[name]


def read_adapters(given: Mapping[str, str]) -> dict[str, Adapter]:
    """Return the adapters of these folders. Raises ConfigError for one that is not served."""
    if not given:
        return {}
    read = plugins.need("adapters", "read", "--lora")
    return {name: read(Path(place)) for name, place in given.items()}
