"""Turns the patterns of phrases.toml into sentences, with the variations that people make.

A pattern with choices stands for many sentences, and a wrapper ("Could you ...?") multiplies them
again: a small model that sees only a few fixed sentences learns them by heart and misses the next.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

T = TypeVar("T")

PHRASES_FILE = Path(__file__).with_name("phrases.toml")
FREE_FILE = Path(__file__).with_name("free.toml")
CHOICE = re.compile(r"\(([^()]*)\)")


def words(text: str) -> tuple[str, ...]:
    """The words of a text; a list of words is easier to read so."""
    return tuple(text.split())


IMPERATIVES = frozenset(
    words(
        "add subtract compute calculate find evaluate solve tell sum say do put take deduct "
        "remove compare give reverse invert flip turn mirror write spell read print show type "
        "make list name break split count capitalize convert change repeat echo copy start begin "
        "go multiply divide explain describe define summarize help compose create translate "
        "recommend suggest buy sell order draw paint sing play search open close send introduce "
        "remind"
    )
)
ASKED = (
    "(Can|Could|Would|Will) you( please| kindly| just|) {p}?",
    "I (want|need|would like|ask) you to {p}.",
    "(Please|Kindly|Just|Now|Next|Then|So|OK, now|And now|First|Quickly) {p}.",
    "(Your task is|Try|It is time|Your job is|I would like you) to {p}.",
    "(Go ahead and|Let us|Let me see you|Be so kind and|Do me a favor and) {p}.",
    "(Hi|Hello|Hey|Hi Mini|Good morning)(,|!) (please |can you |) {p}.",
    "{p}, (please|will you|OK|would you|thanks|if you can).",
)
WONDERED = (
    "(Tell me|Quick question|A question|One more question|Question|I wonder|Say)(:|,) {q}",
    "(I want to know|I would like to know|I have to know|Can you tell me|Do you know)(:|,) {q}",
    "(Well|So|And|OK|Now|Then|Hi|Hello|Hey|Great|Good|Hey Mini|Please|Sorry)(,|!) {q}",
    "{q} (Please tell me.|Do you know?|Any idea?|Thanks!|Please explain.|Tell me.|I forgot.)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrases:
    """One entry of phrases.toml."""

    train: tuple[str, ...]
    held: tuple[str, ...]
    held_normal: frozenset[str]


@functools.cache
def phrases() -> dict[str, Phrases]:
    """All entries by name."""
    table = tomllib.loads(PHRASES_FILE.read_text(encoding="ascii"))
    return {
        key: Phrases(
            train=tuple(entry["train"]),
            held=tuple(entry["held"]),
            held_normal=frozenset(map(normal, entry["held"])),
        )
        for key, entry in table.items()
    }


@functools.cache
def free() -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """free.toml: the questions of each lesson, and the questions with their answers."""
    table = tomllib.loads(FREE_FILE.read_text(encoding="utf-8"))
    return {key: tuple(asked) for key, asked in table["lessons"].items()}, table["exact"]


def is_free(text: str) -> bool:
    """True if this is a question of free.toml, which training must not show."""
    return normal(text) in _free_normal()


@functools.cache
def _free_normal() -> frozenset[str]:
    lessons, exact = free()
    return frozenset(normal(text) for asked in (*lessons.values(), exact) for text in asked)


def normal(text: str) -> str:
    """Case, spaces and most punctuation do not make a new phrasing; signs do (a + b, a - b)."""
    return re.sub(r"[^a-z0-9+\-*/{}]", "", text.lower())


def sentence(pattern: str, rng: Random) -> str:
    """The pattern with every choice made."""

    def choose(match: re.Match[str]) -> str:
        options = match[1].split("|")
        return options[int(rng.random() * len(options))]

    while "(" in pattern:
        pattern = CHOICE.sub(choose, pattern)
    pattern = " ".join(pattern.split())
    return (
        pattern[:1].upper() + pattern[1:] if pattern[:1] != "{" and rng.random() < 0.9 else pattern
    )


def wrapped(text: str, rng: Random) -> str:
    """The sentence inside a longer one."""
    first = text.split(" ", 1)[0].lower().strip(".,?!")
    lower = text[0].lower() + text[1:]
    if first in IMPERATIVES:
        inner = lower.rstrip(".?!")
        return sentence(_pick(ASKED, rng), rng).replace("{p}", inner)
    return sentence(_pick(WONDERED, rng), rng).replace("{q}", lower if rng.random() < 0.6 else text)


def varied(text: str, rng: Random, avoid: Callable[[str], bool]) -> str:
    """A variation in wrapping, case, punctuation or spelling; never one that is to be avoided."""
    while True:
        out = text
        if rng.random() < 0.3:
            out = wrapped(out, rng)
        if rng.random() < 0.2:
            out = out.lower() if "{" not in out else out[0].lower() + out[1:]
        if rng.random() < 0.25:
            out = out.rstrip(".?!")
        if rng.random() < 0.08:
            out = typo(out, rng)
        if not avoid(out):
            return out


def typo(text: str, rng: Random) -> str:
    """One slip of the finger in a longer word, if the text has one."""
    words = text.split(" ")
    longer = [i for i, w in enumerate(words) if len(w) >= 5 and w.strip(".?!,").isalpha()]
    if not longer:
        return text
    i = _pick(longer, rng)
    w = words[i]
    at = 1 + int(rng.random() * (len(w) - 3))
    slips = (
        w[:at] + w[at + 1 :],
        w[:at] + w[at] + w[at:],
        w[:at] + w[at + 1] + w[at] + w[at + 2 :],
    )
    words[i] = _pick(slips, rng)
    return " ".join(words)


def _pick(items: Sequence[T], rng: Random) -> T:
    return items[int(rng.random() * len(items))]
