"""The sampling settings of a chat: fields of each request, checked before they are sent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from minisgl.core import SamplingParams
from minisgl.errors import InvalidSampling

HIDDEN: Final = (
    "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "echo", "pooling", "logit_ids",
)  # fmt: skip

NAMES: Final = tuple(
    field.name for field in msgspec.structs.fields(SamplingParams) if field.name not in HIDDEN
)
"""The settings of a chat. A terminal shows no logprobs, JSON has no integer keys for logit_bias,
and the others are not for chats."""


class Settings:
    """Settings by name. Mutable. Without a value, a setting is the checkpoint's default."""

    def __init__(self, given: Iterable[tuple[str, str]] = ()) -> None:
        """given: names, and values as text. Raises InvalidSampling."""
        self._values: dict[str, Any] = {}
        for name, text in given:
            self.set(name, text)

    def __str__(self) -> str:
        shown = (f"{name} {json.dumps(value)}" for name, value in self._values.items())
        return ", ".join(shown) or "the checkpoint's defaults"

    def set(self, name: str, text: str) -> None:
        """Set `name` to the value of `text`, which is JSON or plain text; "" removes the setting.

        Raises InvalidSampling.
        """
        self._check_name(name)
        if not text:
            self._values.pop(name, None)
            return
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if name == "stop" and not isinstance(value, list):
            value = [value if isinstance(value, str) else text]
        self._values[name] = self._checked(name, value)

    def as_fields(self) -> dict[str, Any]:
        """Return the settings as fields of a request."""
        return dict(self._values)

    def replace(self, fields: dict[str, Any]) -> None:
        """Replace all settings by the fields of a request. If it raises InvalidSampling, it changes
        nothing."""
        for name in fields:
            self._check_name(name)
        self._values = {name: self._checked(name, value) for name, value in fields.items()}

    @staticmethod
    def _check_name(name: str) -> None:
        if name not in NAMES:
            raise InvalidSampling(
                f"there is no setting {name!r}; the settings are {', '.join(NAMES)}"
            )

    @staticmethod
    def _checked(name: str, value: Any) -> Any:
        plain: Any = tuple(value) if isinstance(value, list) else value
        SamplingParams(**{name: plain})
        return value
