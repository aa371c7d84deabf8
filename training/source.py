"""Draws the values that prompts are made of, from one side of the split.

Every generator asks a `Source` for its words, numbers, names and phrasings and never draws them
itself, so one flag decides whether a conversation is for training or for measuring.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from training.families import UNKNOWN, families, listed, names
from training.phrasing import Phrases, is_free, normal, phrases, sentence, varied, words
from training.split import is_held, is_held_pair, is_held_word

T = TypeVar("T")

WORDS_FILE = Path(__file__).with_name("words.txt")
FAQ_FILE = Path(__file__).with_name("faq.toml")
ONSETS = words(
    "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr sh sk sl sm sn "
    "sp st str sw th tr tw y qu"
)
VOWELS = words("a e i o u a e i o u ai ea ee oa oo ou y")
CODAS = ("", "", "", *words("b ck d g k l ll m n nd ng nt p r rd rk s sh ss st t th x"))
NAMES = words(
    "Ada Alan Alice Amir Anna Ben Bob Carla Chen Clara Dana David Diego Elena Emil Emma Eric "
    "Eva Felix Fatima Finn Frida George Grace Hana Hugo Ida Igor Ines Ivan Jack Jane Jonas "
    "Julia Kai Karim Kate Kira Lars Laura Leo Lina Lisa Luca Maria Marta Max Maya Mia Milan "
    "Nadia Nina Noah Nora Olga Oscar Otto Paul Petra Pia Rosa Ruth Sam Sara Sofia Tara Theo "
    "Tim Tom Uma Vera Victor Wanda Yara Yusuf Zoe"
)


@functools.cache
def common_words() -> tuple[str, ...]:
    """The word list of the repository, lower case, in file order."""
    return tuple(WORDS_FILE.read_text(encoding="ascii").split())


@functools.cache
def faq_text() -> str:
    """faq.toml with the families that are served today."""
    return FAQ_FILE.read_text(encoding="ascii").replace("{families}", listed(tuple(families())))


@functools.cache
def engine_words() -> tuple[str, ...]:
    """The words of the questions and answers about the engine: always taught, never held out."""
    text = " ".join((faq_text(), *names(), *UNKNOWN))
    return tuple(sorted(set(re.findall(r"[A-Za-z]{2,}", text))))


@functools.cache
def _engine_words_lower() -> frozenset[str]:
    return frozenset(w.lower() for w in engine_words())


def is_engine_word(word: str) -> bool:
    """True if a question or an answer about the engine has this word, in any case."""
    return word.lower() in _engine_words_lower()


def is_reserved_word(word: str) -> bool:
    """True if training must not show this word."""
    return is_held_word(word) and not is_engine_word(word)


def is_reserved_name(name: str) -> bool:
    """True if training must not show this name."""
    return is_held("name", name.lower()) and not is_engine_word(name)


class Source:
    """A seeded stream of values; mutable because it advances its generator.

    held_values: numbers, words and names come from the held-out side.
    held_phrases: prompt patterns come from the held-out side, without variations.
    """

    def __init__(
        self, rng: random.Random, *, held_values: bool = False, held_phrases: bool = False
    ) -> None:
        self.rng = rng
        self.held_values = held_values
        self.held_phrases = held_phrases

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def choice(self, items: Sequence[T]) -> T:
        """One of the items, evenly; for values that need no split."""
        return items[int(self.rng.random() * len(items))]

    def side(self, draw: Callable[[], T], held: Callable[[T], bool]) -> T:
        """Draws until the value lies on this source's side of the split."""
        while held(value := draw()) != self.held_values:
            pass
        return value

    def number(self, low: int, high: int) -> int:
        """low <= number <= high."""
        return low + int(self.rng.random() * (high - low + 1))

    def pair(self, low: int = 0, high: int = 99) -> tuple[int, int]:
        """Two operands, both in low..high."""
        return self.side(
            lambda: (self.number(low, high), self.number(low, high)), lambda p: is_held_pair(*p)
        )

    def partner(self, a: int, low: int = 0, high: int = 99) -> int:
        """A second operand for a number that is already known."""
        return self.side(lambda: self.number(low, high), lambda b: is_held_pair(a, b))

    def _any_word(self) -> str:
        kind = self.rng.random()
        if kind < 0.08:
            return self.choice(engine_words())
        if kind < 0.55:
            return self.choice(common_words())
        if kind < 0.9:
            syllables = self.number(1, 3)
            word = "".join(
                self.choice(ONSETS) + self.choice(VOWELS) + self.choice(CODAS)
                for _ in range(syllables)
            )
            return word[: self.number(3, 12)]
        return "".join(chr(97 + self.number(0, 25)) for _ in range(self.number(2, 9)))

    def word(self, *, plain: bool = False) -> str:
        """A word: common, invented or random letters. plain: lower case, from the common list."""
        if plain:
            return self.side(lambda: self.choice(common_words()), is_reserved_word)
        word = self.side(self._any_word, is_reserved_word)
        return word.capitalize() if self.chance(0.06) else word

    def name(self) -> str:
        """A first name, known or invented."""

        def draw() -> str:
            return self.choice(NAMES) if self.chance(0.6) else self._any_word().capitalize()

        return self.side(draw, lambda n: is_reserved_name(n) or is_reserved_word(n))

    def code(self) -> int:
        """A four-digit number."""
        return self.side(lambda: self.number(1000, 9999), lambda c: is_held("code", c))

    def ask(self, key: str, **values: object) -> str:
        """A phrasing of phrases.toml with the values filled in; in training often varied."""
        while is_free(text := self._ask(phrases()[key], values)):
            pass
        return text

    def _ask(self, entry: Phrases, values: dict[str, object]) -> str:
        if self.held_phrases:
            return self.choice(entry.held).format(**values)
        avoid = self._avoid(entry)
        while avoid(text := sentence(self.choice(entry.train), self.rng)):
            pass
        if not self.held_values:
            text = varied(text, self.rng, avoid)
        return text.format(**values)

    def _avoid(self, entry: Phrases) -> Callable[[str], bool]:
        return lambda text: normal(text) in entry.held_normal
