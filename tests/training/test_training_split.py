"""What is measured is never taught, and what is taught depends on the seed alone."""

import itertools
import random
import re

from training import phrasing, talk
from training.conversation import Conversation, Message
from training.corpus import suite, training_stream
from training.phrasing import normal, phrases
from training.source import Source, is_reserved_word
from training.split import is_held_pair

NUM_CONVERSATIONS = 4000


def sample(part: int = 0, count: int = NUM_CONVERSATIONS) -> list[Conversation]:
    return list(itertools.islice(training_stream(7, part), count))


def test_the_stream_is_a_function_of_the_seed() -> None:
    assert sample(count=300) == sample(count=300)
    assert sample(count=300) != sample(part=1, count=300)


def test_the_suite_is_deterministic() -> None:
    assert suite(count=5) == suite(count=5)


def test_no_measured_prompt_is_in_the_stream() -> None:
    measured = {c.prompt for group in suite(count=100).values() for c in group}
    assert len(measured) > 3000
    assert not measured & {c.prompt for c in sample()}
    asked = {
        normal(c.prompt[-1].content)
        for row, group in suite(count=100).items()
        if row.startswith(
            ("add", "sub", "reverse", "spell", "count letters", "about", "small", "models")
        )
        for c in group
    }
    taught = {normal(m.content) for c in sample() for m in c.messages if m.role == "user"}
    assert not asked & taught


def test_held_out_operands_never_meet() -> None:
    sums = [
        (abs(int(a)), abs(int(b)))
        for c in sample()
        for m in c.messages
        if m.role == "assistant"
        for a, b in re.findall(r"(-?\d+) [+-] (\d+) = ", m.content)
    ]
    assert len(sums) > 1000
    assert not [pair for pair in sums if is_held_pair(*pair)]


def test_held_out_words_are_never_spelled_or_reversed() -> None:
    words = [
        m.content.split()[0]
        for c in sample()
        for m in c.messages
        if m.role == "assistant" and re.fullmatch(r"\w+ has \d+ letters\.", m.content)
    ]
    spelled = [
        m.content.replace("-", "")
        for c in sample()
        for m in c.messages
        if re.fullmatch(r"(\w-)+\w", m.content)
    ]
    assert len(words) > 50
    assert len(spelled) > 50
    assert not [w for w in words + spelled if is_reserved_word(w)]


def test_held_out_phrasings_are_never_drawn() -> None:
    """Most patterns could make one by chance, alone or wrapped; none may."""
    source = Source(random.Random(2))
    values = {
        "x": "X",
        "w": "W",
        "n": "N",
        "t": "T",
        "k": "K",
        "v": "V",
        "a": 1,
        "b": 2,
        "c": 3,
        "d": 4,
        "s": 5,
        "l": "L",
    }
    free, exact = phrasing.free()
    asked = {normal(text) for group in (*free.values(), exact) for text in group}
    assert len(asked) > 100
    for key, entry in phrases().items():
        held = {normal(text.format(**values)) for text in entry.held}
        drawn = {normal(source.ask(key, **values)) for _ in range(300)}
        assert len(drawn) > 15, key
        assert not (held | asked) & drawn, key


def test_held_out_questions_are_not_taught() -> None:
    held = {normal(text) for q in talk.questions() for text in q.held}
    source = Source(random.Random(4))
    turns = [talk.faq_turn(q, source) for q in talk.questions() for _ in range(60)]
    assert len(held) >= 2 * 50
    assert not [t.user for t in turns if normal(t.user) in held or phrasing.is_free(t.user)]


def test_an_answer_has_one_question() -> None:
    """No prompt without history is taught with two answers."""
    first: dict[Message, str] = {}
    for c in sample():
        if len(c.messages) == 2:
            assert first.setdefault(c.messages[0], c.expected) == c.expected
