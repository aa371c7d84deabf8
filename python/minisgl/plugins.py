"""The only way from the core to another package: tables of names, filled from manifests.

A manifest is a module with `ROWS`. It imports nothing of what its rows name, so reading all of them
takes a millisecond. The manifests of our own packages are found by name: a folder that was deleted
is absent, whatever pip knows about it. A stranger's distribution names its manifest by an entry
point of the group `minisgl.plugins`. The core's own rows are in a manifest, too. A row's object is
imported when something is built from it, never in a step. `docs/extending.md` shows how to write a
manifest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from minisgl.errors import ConfigError

logger = logging.getLogger(__name__)

GROUP: Final = "minisgl.plugins"

TABLES: Final = {
    "families": "minisgl_zoo",
    "encoders": "minisgl_zoo",
    "weights": "minisgl_bench",
    "wrappers": "minisgl_zoo",
    "rotations": "minisgl_zoo",
    "weight_formats": "minisgl_zoo",
    "hubs": "minisgl_zoo",
    "gguf": "minisgl_zoo",
    "cache_groups": "minisgl_zoo",
    "kv_formats": "minisgl_zoo",
    "chat_formats": "minisgl_zoo",
    "answers": "minisgl_zoo",
    "grammars": "minisgl_zoo",
    "tokenizers": "minisgl_zoo",
    "logit_options": "minisgl_zoo",
    "vision": "minisgl_zoo",
    "pooling": "minisgl_zoo",
    "drafters": "minisgl_zoo",
    "drafts": "minisgl_zoo",
    "adapters": "minisgl_zoo",
    "ops": "minisgl_kernels",
    "attention": "minisgl_kernels",
    "moe": "minisgl_kernels",
    "runners": "minisgl_kernels",
    "all_reduce": "minisgl_kernels",
    "memory": "minisgl_kernels",
    "commands": "minisgl_gateway",
    "servers": "minisgl_gateway",
    "checks": "minisgl_gateway",
    "options": "minisgl_gateway",
    "nodes": "minisgl_gateway",
    "keys": "minisgl_gateway",
    "routes": "minisgl_gateway",
    "error_forms": "minisgl_gateway",
    "start_lines": "minisgl_gateway",
    "request_headers": "minisgl_gateway",
    "prompt_watchers": "minisgl_gateway",
    "metrics": "minisgl_gateway",
    "loop_observers": "minisgl_gateway",
    "flag_hints": "minisgl_gateway",
    "guards": "minisgl_bench",
}
"""Each table -> the package of ours that has most rows of it. An error about a row that no package
has names it."""

OURS: Final = ("minisgl", "minisgl_zoo", "minisgl_kernels", "minisgl_gateway", "minisgl_bench")


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a package, by name.

    target: "module:object". keys: other names of the same object. when: facts that must hold where
    it is used, as {"device": "cuda"}. about: a line for people.
    """

    table: str
    name: str
    target: str
    keys: tuple[str, ...] = ()
    when: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def load(self) -> Any:
        """Import the object."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)


def row_of(table: str, name: str, **facts: str) -> Row | None:
    """Return the row of this name, or None if no package has one."""
    named = (row for row in rows(table, **facts) if name == row.name or name in row.keys)
    return next(named, None)


def find(table: str, name: str, **facts: str) -> Any | None:
    """Return the object of this name, or None if no package has it."""
    row = row_of(table, name, **facts)
    return row.load() if row else None


def need(table: str, name: str, what: str, **facts: str) -> Any:
    """Return the object of this name. what: the feature, as in "--api-key". Raises ConfigError if
    no package has it."""
    found = find(table, name, **facts)
    if found is None:
        raise ConfigError(f"{what} {absent(table)}")
    return found


def absent(table: str) -> str:
    """Return the end of a sentence about a feature that no package has."""
    return f"needs {TABLES[table]}, which is not installed here"


def lacks(table: str) -> bool:
    """Return whether the package of ours that has most rows of the table is absent."""
    return find_spec(TABLES[table]) is None


def rows(table: str, **facts: str) -> Iterator[Row]:
    """Yield the rows of a table whose `when` these facts fulfil, in the order of the manifests."""
    for row in installed():
        if row.table == table and row.when.items() <= facts.items():
            yield row


def digest() -> str:
    """Return a digest of all rows. Nodes compare it: all ranks must build the same model."""
    return hashlib.sha256(repr(installed()).encode()).hexdigest()[:16]


_installed: tuple[Row, ...] | None = None  # what is installed is a fact of the process


def installed() -> tuple[Row, ...]:
    """Return the rows of all manifests. Raises ConfigError if two rows of a table have one name."""
    global _installed
    if _installed is None:
        _installed = read_manifests()
    return _installed


def adopt(rows: tuple[Row, ...]) -> None:
    """Use the rows that the parent of this process has read."""
    global _installed
    _installed = rows


def read_manifests() -> tuple[Row, ...]:
    """Read all manifests. One of a stranger that does not load is a line of the log, and absent."""
    # Here, because a worker gets its rows from its parent, and need not wait for this import.
    from importlib.metadata import entry_points

    found = [row for name in OURS if find_spec(name) for row in _read(f"{name}.manifest")]
    for point in entry_points(group=GROUP):
        try:
            found += _checked(_read(point.value))
        except Exception as error:
            owner = point.dist.name if point.dist else point.value
            logger.error("plugin %s is not used: %s: %s", owner, type(error).__name__, error)
    _refuse_duplicates(found)
    return tuple(found)


def _refuse_duplicates(found: Iterable[Row]) -> None:
    seen: dict[tuple[str, str], Row] = {}
    for row in found:
        for name in (row.name, *row.keys):
            other = seen.setdefault((row.table, name), row)
            if other is not row:
                raise ConfigError(
                    f"two plugins have {name!r} of {row.table}: {other.target} and {row.target}; "
                    "remove one of them"
                )


def _read(module: str) -> list[Row]:
    return list(import_module(module).ROWS)


def _checked(found: list[Row]) -> list[Row]:
    """Return the rows of a stranger. Raises TypeError or ValueError for what is no row."""
    for row in found:
        if not isinstance(row, Row):
            raise TypeError(f"ROWS has {row!r}, which is no minisgl.plugins.Row")
        if row.table not in TABLES:
            raise ValueError(f"there is no table {row.table!r}; one of {', '.join(TABLES)}")
    return found
