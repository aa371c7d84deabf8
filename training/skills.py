"""Turns that can be computed: arithmetic, letters and counting.

Each task has one form of answer, so that a measurement can ask for the exact text.
"""

from __future__ import annotations

from collections.abc import Callable

from training.conversation import Turn
from training.phrasing import words
from training.source import Source
from training.split import is_held, is_held_pair

NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
COUNTS = ("two", "three", "four", "five", "2", "3", "4", "5")
# Letters and signs beyond ASCII, so that copying (and streaming) multi-byte characters is taught.
UNICODE = (
    "äöüßéèêñçåøæłžşğőîãÄÖÜÉαβγδλπσωЖдиябшю你好世界中文日本語ひらカタ한국어€£→★☀♥😀😎🚀🎉🐍🦙👍"
)


def add(s: Source) -> Turn:
    """Two-digit addition."""
    return _sum("add", *s.pair(), s)


def subtract(s: Source) -> Turn:
    """Two-digit subtraction, negative results included."""
    return _difference("subtract", *s.pair(), s)


def three_digits(s: Source) -> Turn:
    """Sums and differences with three-digit operands."""
    a, b = s.pair(0, 999)
    make = _sum if s.chance(0.5) else _difference
    return make("three digits", a, b, s)


def _said(s: Source, *numbers: int) -> tuple[object, ...]:
    """The numbers as digits; small ones sometimes as words, but not for measuring."""
    if not s.held_values and max(numbers) < len(NUMBERS) and s.chance(0.3):
        return tuple(NUMBERS[n] for n in numbers)
    return numbers


def _sum(task: str, a: int, b: int, s: Source) -> Turn:
    said = _said(s, a, b)
    question = s.ask("add", a=said[0], b=said[1])
    return Turn(
        task=task, user=question, answer=f"{a} + {b} = {a + b}.", brief=str(a + b), number=a + b
    )


def _difference(task: str, a: int, b: int, s: Source) -> Turn:
    said = _said(s, a, b)
    question = s.ask("subtract", a=said[0], b=said[1])
    return Turn(
        task=task, user=question, answer=f"{a} - {b} = {a - b}.", brief=str(a - b), number=a - b
    )


def compare(s: Source) -> Turn:
    """The larger of two numbers, or even and odd."""
    if s.chance(0.3):
        a = s.side(lambda: s.number(0, 99), lambda n: is_held("parity", n))
        kind = "odd" if a % 2 else "even"
        return Turn(
            task="compare",
            user=s.ask("parity", a=a),
            answer=f"{a} is {kind}.",
            brief=kind,
            number=a,
        )
    a, b = s.side(lambda: (s.number(0, 99), s.number(0, 99)), lambda p: _is_held_choice(*p))
    top = max(a, b)
    question = s.ask("larger", a=a, b=b)
    return Turn(
        task="compare", user=question, answer=f"{top} is larger.", brief=str(top), number=top
    )


def _is_held_choice(a: int, b: int) -> bool:
    return a == b or is_held_pair(a, b)


def reverse(s: Source) -> Turn:
    """A word backwards."""
    w = s.word()
    return Turn(task="reverse", user=s.ask("reverse", w=w), answer=w[::-1], brief=w[::-1], word=w)


def spell(s: Source) -> Turn:
    """A word letter by letter, with hyphens."""
    w = s.word()
    return Turn(
        task="spell", user=s.ask("spell", w=w), answer="-".join(w), brief="-".join(w), word=w
    )


def letters(s: Source) -> Turn:
    """The number of letters of a word."""
    w = s.word()
    answer = f"{w} has {len(w)} letters."
    return Turn(
        task="count letters", user=s.ask("letters", w=w), answer=answer, brief=str(len(w)), word=w
    )


def occurrences(s: Source) -> Turn:
    """How often a word has a letter."""
    w = s.word()
    letter = s.choice(w.lower()) if s.chance(0.85) else chr(97 + s.number(0, 25))
    n = w.lower().count(letter)
    answer = f"{w} has the letter {letter} {n} time{'s' * (n != 1)}."
    question = s.ask("occurrences", w=w, l=letter)
    return Turn(task="count one letter", user=question, answer=answer, brief=str(n), word=w)


def edges(s: Source) -> Turn:
    """The first or last letter of a word."""
    w = s.word()
    name, letter = ("first", w[0]) if s.chance(0.5) else ("last", w[-1])
    answer = f"The {name} letter of {w} is {letter}."
    return Turn(
        task="first and last letter", user=s.ask(name, w=w), answer=answer, brief=letter, word=w
    )


def upper(s: Source) -> Turn:
    """A word in capitals."""
    w = s.word()
    return Turn(
        task="upper case", user=s.ask("upper", w=w), answer=w.upper(), brief=w.upper(), word=w
    )


def copy(s: Source) -> Turn:
    """A text again, or a word several times."""
    if s.chance(0.35):
        w, n = s.word(), s.number(0, 3)
        answer = " ".join([w] * (n + 2))
        times = COUNTS[n + (4 if s.chance(0.5) else 0)]
        question = s.ask("times", w=w, n=times)
        return Turn(task="copy", user=question, answer=answer, brief=answer, word=w)
    text = copied_text(s)
    return Turn(task="copy", user=s.ask("copy", t=text), answer=text, brief=text)


def copied_text(s: Source) -> str:
    """One to eight words, numbers and characters of other scripts."""
    parts: list[str] = []
    for _ in range(s.number(1, 8)):
        kind = s.rng.random()
        if kind < 0.65:
            parts.append(s.word())
        elif kind < 0.8:
            parts.append(str(s.code() if s.chance(0.3) else s.pair()[0]))
        else:
            parts.append("".join(s.choice(UNICODE) for _ in range(s.number(1, 5))))
    return " ".join(parts)


def count(s: Source) -> Turn:
    """Numbers in a row, up, down or in steps."""
    kind = s.rng.random()
    if kind < 0.1:
        step = s.choice((2, 5, 10))
        a, b = sorted(s.pair(0, 100))
        row = list(range(a, b + 1, step))[:20]
        b = row[-1]
        return _row("count", row, s.ask("count_by", a=a, b=b, s=step))
    if kind < 0.2:
        b = s.side(lambda: s.number(1, 100), lambda n: _is_held_row(1, n))
        return _row("count", list(range(1, b + 1)), s.ask("count_to", b=_said(s, b)[0]))
    longest = 100 if s.chance(0.1) else 20

    def ends() -> tuple[int, int]:
        a = s.number(0, 12) if s.chance(0.3) else s.number(0, 99)
        return a, min(100, a + s.number(1, longest))

    a, b = s.side(ends, lambda p: _is_held_row(*p))
    if kind < 0.4:
        return _row("count", list(range(b, a - 1, -1)), s.ask("count_down", a=a, b=b))
    return _row("count", list(range(a, b + 1)), s.ask("count_up", a=a, b=b))


def _is_held_row(a: int, b: int) -> bool:
    return is_held("row", a, b)


def _row(task: str, row: list[int], question: str) -> Turn:
    answer = ", ".join(map(str, row))
    return Turn(task=task, user=question, answer=answer, brief=answer)


# name in the accuracy table -> generator, and its weight in the mixture
SKILLS: dict[str, tuple[Callable[[Source], Turn], float]] = {
    "add": (add, 10),
    "subtract": (subtract, 13),
    "three digits": (three_digits, 4),
    "compare": (compare, 2),
    "reverse": (reverse, 10),
    "spell": (spell, 6),
    "count letters": (letters, 7),
    "first and last letter": (edges, 3),
    "upper case": (upper, 3),
    "copy": (copy, 4),
    "count": (count, 5),
    "count one letter": (occurrences, 4),
}
