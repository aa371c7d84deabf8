"""The environment variables of the chat and of the energy counters.

MINISGL_SHELL_MAX_TOKENS  settings of `minisgl chat` unless --set gives them; also _TEMPERATURE,
                          _TOP_K and _TOP_P
MINISGL_POWERCAP          where the CPUs' energy is read (default: /sys/class/powercap)
"""

from __future__ import annotations

import os
from pathlib import Path


def powercap() -> Path:
    return Path(os.environ.get("MINISGL_POWERCAP") or "/sys/class/powercap")


def shell_settings() -> list[tuple[str, str]]:
    """Return the names and values of the settings of a chat that the environment has."""
    names = ("max_tokens", "temperature", "top_k", "top_p")
    found = ((name, os.environ.get(f"MINISGL_SHELL_{name.upper()}", "")) for name in names)
    return [(name, value) for name, value in found if value]


def chat_history() -> Path:
    """The file with the lines typed in `minisgl chat`; not created here."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "minisgl" / "chat_history"
