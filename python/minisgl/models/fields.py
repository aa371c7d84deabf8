"""Typed access to the fields of config.json."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a JSON object. An absent or null field has the value `default`, if given."""

    values: Mapping[str, Any]
    where: str

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._value(name, default)
        if type(value) is not int or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        if value >= 2**31:
            raise self.error(name, "an integer below 2 ** 31")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Return the field, or None if it is null or absent."""
        return None if self.values.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.error(name, "a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def error(self, name: str, expected: str) -> ConfigError:
        if self.values.get(name) is None:
            return ConfigError(f"{self.where}: {name} is missing; expected {expected}")
        return ConfigError(f"{self.where}: {name} must be {expected}, got {self.values[name]!r}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value
