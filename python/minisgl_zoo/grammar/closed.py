"""Closes the objects in the schema of an answer or of a tool's arguments.

By JSON Schema an object may have properties that its schema does not declare. A function takes no
others, a program seldom reads them in an answer, and a weak model would write them until its last
token. So each object that declares properties gets `additionalProperties: false`, unless its schema
says which others it may have.

Several schemas may describe one object: allOf, anyOf, oneOf and $ref beside its own properties. A
closed one would forbid the properties of the others. So only one of them is closed, the outermost,
or each branch of an anyOf or oneOf, and it declares the names of all others with the schema true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote

from minisgl.errors import InvalidSampling
from minisgl_zoo.grammar.schema import DATA, NAMED, changed, target

MAX_STEPS: Final = 200_000
"""Schemas that are looked at, and names that are added: 0.5 s of a busy core. A schema of 128 KiB
has at most 20,000; references and branches can multiply them."""
_SAYS: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_REFUSED: Final = ("not", "if", "then", "else", "dependentSchemas", "dependencies", "propertyNames")
_UNIONS: Final = ("anyOf", "oneOf")


def closed(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the schema with closed objects. llguidance must have compiled it.

    Raises InvalidSampling, which names `param`, if it becomes too large, or if a definition that
    llguidance did not need is wrong.
    """
    closer = _Closer(root=schema, param=param)
    try:
        while True:
            result: dict[str, Any] = closer.of(schema, "")
            if closer.found <= closer.shared:
                return result
            closer.shared |= closer.found
    except InvalidSampling:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidSampling(
            f"{param} cannot be used: a part of it is no JSON schema ({error!r})", param=param
        ) from None


@dataclass(slots=True, kw_only=True)
class _Closer:
    """Mutable: it counts its steps, and finds shared schemas.

    shared: pointers to schemas that describe an object together with others, so that they stay
    open, and the schema that refers to them is closed. found: those that a walk met; it may find
    more if it knows them. declared: `_own_names` of what a reference points to. cyclic: whether a
    pointer's schema refers to itself.
    """

    root: dict[str, Any]
    param: str
    shared: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)
    declared: dict[str, tuple[frozenset[str] | None, list[str]]] = field(default_factory=dict)
    cyclic: dict[str, bool] = field(default_factory=dict)
    steps: int = MAX_STEPS

    def of(
        self,
        schema: Any,
        pointer: str,
        others: frozenset[str] = frozenset(),
        *,
        is_open: bool = False,
    ) -> Any:
        """Return a closed schema. others: the names that the schemas around it declare for the same
        object. is_open: whether it stays open, because another schema of the object is closed."""
        if isinstance(schema, list):
            return [self.of(each, f"{pointer}/{i}") for i, each in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        self._count(1)
        is_open = is_open or pointer in self.shared
        shown = {
            key: value if key in DATA or key in _REFUSED else self._below(key, value, pointer)
            for key, value in schema.items()
            if key not in ("allOf", *_UNIONS)
        }
        own = {key: value for key, value in schema.items() if key not in _UNIONS}
        names = None if is_open else _joined(others, self._names(own))
        is_wrapper = _is_alone(schema, "allOf") and len(schema["allOf"]) == 1
        for key in ("allOf", *_UNIONS):
            if key not in schema:
                continue
            if key != "allOf":
                around = self._around(schema, key, names)
            else:
                around = others if is_wrapper and not is_open else None
            shown[key] = [
                self.of(each, f"{pointer}/{key}/{i}", around or frozenset(), is_open=around is None)
                for i, each in enumerate(schema[key])
            ]
        shown = {key: shown[key] for key in schema}  # the order of keys is that of properties
        reference = _pointer(schema)
        if reference is not None and (is_open or others or not _is_alone(schema, "$ref")):
            self.found.add(reference)
        if names is None or is_wrapper or any(key in schema for key in _UNIONS):
            return shown
        if reference is not None and (reference not in self.shared or self._is_cyclic(reference)):
            return shown  # llguidance refuses a cycle of references with other keywords beside them
        return self._closed(shown, names)

    def _around(
        self, schema: dict[str, Any], key: str, names: frozenset[str] | None
    ) -> frozenset[str] | None:
        """Return the names that are declared beside the branches of `key`, anyOf or oneOf; None if
        the branches stay open. names: without those of anyOf and oneOf."""
        for other in _UNIONS:
            if other != key and other in schema:
                names = _joined(names, self._names({other: schema[other]}))
        return names

    def _below(self, key: str, value: Any, pointer: str) -> Any:
        """Return the value of a keyword with closed schemas of other objects."""
        pointer = f"{pointer}/{_escaped(key)}"
        if key in NAMED and isinstance(value, dict):
            return {
                name: self.of(part, f"{pointer}/{_escaped(name)}") for name, part in value.items()
            }
        return self.of(value, pointer)

    def _closed(self, schema: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        kinds = schema.get("type", "object")
        declared = schema.get("properties", {})
        if (
            not (names or "properties" in schema)
            or not isinstance(declared, dict)
            or "object" not in kinds
            or {"const", "enum", *_SAYS} & schema.keys()
            or schema.get("minProperties", 0) > len(names)
        ):
            return schema
        more = dict.fromkeys(sorted(names - declared.keys()), True)
        if more and {"minProperties", "maxProperties"} & schema.keys():
            return schema  # llguidance counts properties only where all declared ones are required
        self._count(len(more))
        return {**schema, "properties": {**declared, **more}, "additionalProperties": False}

    def _names(self, schema: Any) -> frozenset[str] | None:
        """Return the names of properties that a schema declares for its object; None if the object
        may have others."""
        names, references = self._own_names(schema)
        met = set(references)
        while references:
            self._count(1)
            reference = references.pop()
            if reference not in self.declared:
                self.declared[reference] = self._own_names(target(self.root, reference))
            more, others = self.declared[reference]
            names = _joined(names, more)
            references += [each for each in others if each not in met]
            met.update(others)
        return names

    def _own_names(self, schema: Any) -> tuple[frozenset[str] | None, list[str]]:
        """Return `_names` without those of references, and the references."""
        if not isinstance(schema, dict):
            return frozenset(), []
        self._count(1)
        names: frozenset[str] | None = None
        if not any(key in schema for key in _REFUSED) and not any(
            schema.get(key, False) is not False for key in _SAYS
        ):
            names = frozenset((*schema.get("properties", ()), *schema.get("required", ())))
        references = []
        if "$ref" in schema and _pointer(schema) is None:
            names = None
        elif "$ref" in schema:
            references.append(schema["$ref"])
        for key in ("allOf", *_UNIONS):
            for part in schema.get(key, ()):
                more, others = self._own_names(part)
                names = _joined(names, more)
                references += others
        return names, references

    def _is_cyclic(self, pointer: str) -> bool:
        """Return whether the schema at `pointer` refers to itself, also by way of others."""
        if pointer not in self.cyclic:
            waiting, met = [f"#{quote(pointer)}"], set[str]()
            for reference in waiting:  # which grows
                found: list[str] = []
                changed(target(self.root, reference), partial(self._keep_reference, found))
                waiting += {*found} - met
                met.update(found)
            self.cyclic[pointer] = pointer in {unquote(reference[1:]) for reference in met}
        return self.cyclic[pointer]

    def _keep_reference(self, found: list[str], schema: dict[str, Any]) -> dict[str, Any]:
        self._count(1)
        if _pointer(schema) is not None:
            found.append(schema["$ref"])
        return schema

    def _count(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise InvalidSampling(
                f"{self.param} cannot be used: references or branches make it too large; use a "
                "simpler schema",
                param=self.param,
            )


def _joined(names: frozenset[str] | None, more: frozenset[str] | None) -> frozenset[str] | None:
    return None if names is None or more is None else names | more


def _is_alone(schema: dict[str, Any], key: str) -> bool:
    """Return whether `key`, and no other keyword, describes an object's properties."""
    keywords = {"properties", "required", "allOf", "$ref", *_UNIONS, *_SAYS}
    return keywords & schema.keys() == {key}


def _pointer(schema: dict[str, Any]) -> str | None:
    """Return the pointer of a schema's reference; None without one to the same document."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        return unquote(reference[1:])
    return None


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
