"""Proves that no value is valid by two JSON schemas. Where it finds no proof, there may be one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

_KINDS: Final = {
    type(None): "null", bool: "boolean", int: "number", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip
STEPS: Final = 200_000
"""Schemas, values and names that are looked at for all `oneOf` of a schema: 0.5 s of a busy core.
150 objects, each with its own const as a discriminator, need 125,000."""
MAX_DEPTH: Final = 20
"""Unions and properties within one another. References may go in circles."""


@dataclass(slots=True, kw_only=True)
class Disjointness:
    """Mutable: it counts its steps. root, target: resolve references."""

    root: Any
    target: Callable[[Any, str], Any]
    steps: int = STEPS

    def holds(self, first: Sequence[Any], second: Sequence[Any], depth: int = 0) -> bool:
        """Return whether no value is valid by all of `first` and all of `second`.

        They exclude each other by their types, by the values of const and enum, or because an
        object must have a property that cannot be valid by both.
        """
        if self.steps < 0 or depth > MAX_DEPTH:
            return False
        one, other = self._parts(first), self._parts(second)
        if one is None or other is None or self._differ(one, other, depth):
            return True
        for own, others in ((one, other), (other, one)):
            for index, part in enumerate(own):
                key = next((k for k in ("anyOf", "oneOf") if isinstance(part.get(k), list)), None)
                if key:
                    left = {name: value for name, value in part.items() if name != key}
                    rest = [*own[:index], left, *own[index + 1 :]]
                    return all(
                        self.holds([*rest, branch], others, depth + 1) for branch in part[key]
                    )
        return False

    def _parts(self, schemas: Sequence[Any]) -> list[dict[str, Any]] | None:
        """Return these schemas with those of their allOf and $ref; None if nothing is valid."""
        parts: list[dict[str, Any]] = []
        waiting, seen = list(schemas), set()
        for part in waiting:  # which grows
            self.steps -= 1
            if part is False:
                return None
            if not isinstance(part, dict):
                continue
            parts.append({key: value for key, value in part.items() if key != "allOf"})
            if isinstance(part.get("allOf"), list):
                waiting += part["allOf"]
            reference = part.get("$ref")
            if isinstance(reference, str) and reference[:1] == "#" and reference not in seen:
                seen.add(reference)
                try:
                    waiting.append(self.target(self.root, reference))
                except (LookupError, TypeError, ValueError):
                    continue
        return parts

    def _differ(self, one: list[dict[str, Any]], other: list[dict[str, Any]], depth: int) -> bool:
        """Return whether types, values or required properties exclude each other."""
        kinds = _kinds([*one, *other])
        if not kinds:
            return True
        values = []
        for part in (*one, *other):
            if (choices := _values(part)) is not None:
                self.steps -= len(choices)
                values.append(set(map(_identity, choices)))
        if values and not any(identity[0] in kinds for identity in set.intersection(*values)):
            return True
        if kinds != {"object"}:
            return False
        names = dict.fromkeys(name for part in (*one, *other) for name in _required(part))
        self.steps -= len(names)
        return any(
            self.holds(_property(one, name), _property(other, name), depth + 1) for name in names
        )


def _kinds(parts: list[dict[str, Any]]) -> set[str]:
    """Return the types that a value may have which is valid by all parts."""
    kinds = set(_KINDS.values())
    for part in parts:
        named = part.get("type")
        if isinstance(named, str | list):
            given = [named] if isinstance(named, str) else named
            kinds &= {
                "number" if kind == "integer" else kind for kind in given if isinstance(kind, str)
            }
    return kinds


def _values(part: dict[str, Any]) -> list[Any] | None:
    """Return the only values that are valid by `const` or `enum`; None without these."""
    if "const" in part:
        return [part["const"]]
    choices = part.get("enum")
    return choices if isinstance(choices, list) else None


def _identity(value: Any) -> tuple[str, Any]:
    """Return what two values have in common exactly if they are equal in JSON: 1 is 1.0, and is not
    true."""
    kind = _KINDS[type(value)]
    if kind == "array":
        return kind, tuple(map(_identity, value))
    if kind == "object":
        return kind, frozenset((name, _identity(part)) for name, part in value.items())
    return kind, value


def _required(part: dict[str, Any]) -> list[str]:
    names = part.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(parts: list[dict[str, Any]], name: str) -> list[Any]:
    """Return the schemas by which the property must be valid."""
    found = []
    for part in parts:
        declared = part.get("properties")
        if isinstance(declared, dict) and name in declared:
            found.append(declared[name])
        elif "patternProperties" not in part:
            found.append(part.get("additionalProperties", True))
    return found
