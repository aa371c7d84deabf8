"""A file of API keys, and a clock for their limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl_gateway.keys.ring import KeyRing

SECRET, OTHER = "sk-first-0123456789", "sk-second-0123456789"
FILE = f"""
[light]
key = "{SECRET}"
requests_per_minute = 3

[admin]
key = "{OTHER}"
admin = true
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key_file(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def key_ring(file: Path) -> KeyRing:
    """Return the keys of a file. Its package may be absent where the core's tests run alone."""
    from minisgl_gateway.keys.ring import KeyRing

    return KeyRing(None, str(file))
