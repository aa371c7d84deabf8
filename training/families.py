"""The names of the models that the engine serves, read from docs/models.md.

A row of its first table has an architecture, and a text that begins with names: "Qwen2 and Qwen2.5:
biases on q, k and v".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/models.md"
ROW = re.compile(r"^\| `\w+` \| ([^|:]+): ", re.M)
SEPARATOR = re.compile(r", | and ")
VERSION = re.compile(r"(.*[A-Za-z]{2,})[ -]?\d.*")
# Not served here. A test holds that the registry has none of them.
UNKNOWN = (
    *("Llama 4", "Phi-2", "GPT-2", "GPT-J", "GPT-NeoX"),
    *("GPT-4", "GPT-5", "ChatGPT", "Claude", "Gemini", "Grok", "T5", "Whisper", "BLOOM"),
    *("OPT", "MPT", "RWKV", "Jamba", "DBRX", "StableLM", "Baichuan", "InternLM2"),
)


@functools.cache
def names() -> tuple[str, ...]:
    """The models by name, such as Qwen2.5, in alphabetical order."""
    found: set[str] = set()
    for head in ROW.findall(PAGE.read_text(encoding="utf-8")):
        inside = SEPARATOR.split(", ".join(re.findall(r"\((.*?)\)", head)))
        found.update(SEPARATOR.split(re.sub(r" ?\(.*?\)", "", head)))
        found.update(name for name in inside if name[:1].isupper())
    return tuple(sorted(found, key=str.lower))


@functools.cache
def families() -> dict[str, tuple[str, ...]]:
    """The names by what they begin with: Qwen2.5 and Qwen3 are in "Qwen"."""
    heads = {VERSION.sub(r"\1", name) for name in names()}
    short = [h for h in heads if not any(h.startswith((o + " ", o + "-")) for o in heads)]
    groups: dict[str, list[str]] = {head: [] for head in sorted(short, key=str.lower)}
    for name in names():
        head = VERSION.sub(r"\1", name)
        groups[next(s for s in short if head == s or head.startswith((s + " ", s + "-")))].append(
            name
        )
    return {head: tuple(group) for head, group in groups.items()}


def listed(items: Sequence[str]) -> str:
    """The items as English lists them: a, b and c."""
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))
