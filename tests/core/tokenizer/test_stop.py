"""Stop strings against an oracle that checks every prefix of the text."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.tokenizer.output import StopMatcher


def _oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def _held(text: str, stops: list[str]) -> int:
    """The longest end of `text` that begins a stop string."""
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


_ab = st.text(alphabet="ab", max_size=40)
_stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(text=_ab, stops=_stops, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_against_the_oracle(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    got = ""
    for start, end in itertools.pairwise(bounds):
        got += matcher.feed(text[start:end])
        if matcher.match is not None:
            break
        assert len(got) == end - _held(text[:end], stops), "held back too much or too little"
    else:
        got += matcher.flush()
    assert (got, matcher.match) == _oracle(text, stops)


@pytest.mark.parametrize(
    ("stops", "chunks", "text", "match"),
    [
        (["\n\n"], ["a\n", "\nb"], "a", "\n\n"),
        (["END"], ["the E", "N", "", "Demo EN", "D"], "the ", "END"),
        (["bcd", "abcde"], ["abcde"], "a", "bcd"),
        (["cd", "bcd"], ["abcd"], "a", "bcd"),
        (["stop"], ["sto"], "sto", None),
        (["🦜"], ["a🦜"], "a", "🦜"),
    ],
)
def test_examples(stops: list[str], chunks: list[str], text: str, match: str | None) -> None:
    matcher = StopMatcher(stops)
    got = ""
    for chunk in chunks:
        got += matcher.feed(chunk)
        if matcher.match is not None:
            break
    assert got + (matcher.flush() if matcher.match is None else "") == text
    assert matcher.match == match


def test_repetitive_stop_strings_take_linear_time() -> None:
    matcher = StopMatcher(["a" * 1023 + chr(ord("b") + i) for i in range(16)])
    start = time.perf_counter()
    got = "".join(matcher.feed("aaaa") for _ in range(2_000)) + matcher.flush()
    assert got == "a" * 8_000
    assert time.perf_counter() - start < 30  # 0.1 s here; looking at all prefixes takes minutes


@settings(max_examples=100, deadline=None)
@given(text=_ab, stops=_stops)
def test_a_stop_string_can_be_part_of_the_text(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, included=True)
    got = ""
    for char in text:
        if matcher.match is None:
            got += matcher.feed(char)
    got += matcher.flush()
    want, match = _oracle(text, stops)
    assert (got, matcher.match) == (want + (match or ""), match)
