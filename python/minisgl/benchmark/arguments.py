"""Values of a benchmark's flags, refused where they are read instead of where they divide."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any, Final

from minisgl.server.args import integer

__all__ = [
    "above_zero",
    "from_zero",
    "integer",
    "json_object",
    "natural",
    "naturals",
    "server_root",
]

natural: Final = integer(1)


def naturals(text: str) -> list[int]:
    """With commas between."""
    return [natural(value) for value in text.split(",")]


def above_zero(text: str) -> float:
    if not 0 < (value := _float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def from_zero(text: str) -> float:
    if not 0 <= (value := _float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def server_root(text: str) -> str:
    """OpenAI's clients are told of a server with /v1, which our paths have."""
    return text.rstrip("/").removesuffix("/v1")


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object like {{"top_k": 5}}, got {text!r}')
    return value
