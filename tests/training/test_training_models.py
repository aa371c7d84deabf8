"""What is taught about models is what the registry has; each question has one answer."""

import re

from minisgl.models.registry import supported_architectures
from training.families import UNKNOWN, families, names
from training.phrasing import free, normal
from training.source import is_engine_word
from training.talk import free_turns, questions


def test_every_architecture_is_in_a_family_that_is_taught() -> None:
    taught = {re.sub(r"[^a-z]", "", family.lower()) for family in families()}
    taught |= {"command", "bailing"}  # Cohere's models; Ling and Ring
    for architecture in supported_architectures():
        spelled = re.sub(r"[^a-z]", "", architecture.removesuffix("ForCausalLM").lower())
        assert [family for family in taught if spelled.startswith(family)], architecture
    assert {name for group in families().values() for name in group} == set(names())
    (answer,) = (q.answer for q in questions() if q.key == "models")
    assert all(family in answer for family in families())


def test_models_that_are_taught_as_unknown_are_not_served() -> None:
    served = {name.lower() for name in (*names(), *families())}
    assert not served & {name.lower() for name in UNKNOWN}


def test_words_of_names_are_not_held_out() -> None:
    words = {w for name in (*names(), *UNKNOWN) for w in re.findall("[A-Za-z]{2,}", name)}
    assert all(is_engine_word(word) for word in words)


def test_a_question_belongs_to_one_answer() -> None:
    first: dict[str, str] = {}
    for question in questions():
        assert '"' not in question.answer
        asked = [text for pattern in question.asks for text in expanded(pattern)]
        for text in (*question.about, *question.feature, *question.do, *asked, *question.held):
            assert first.setdefault(normal(text), question.key) == question.key
    lessons, exact = free()
    assert len(free_turns()) == sum(map(len, lessons.values())) + len(exact) > 150


def expanded(pattern: str) -> list[str]:
    """The pattern with every choice made, in all ways."""
    match = re.search(r"\(([^()]*)\)", pattern)
    if not match:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [text for word in match[1].split("|") for text in expanded(head + word + tail)]
