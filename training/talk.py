"""Turns with fixed answers: questions about the engine, small talk, and refusals."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass

from training.conversation import Turn
from training.families import UNKNOWN, families, listed, names
from training.phrasing import normal, varied
from training.source import Source, faq_text, is_engine_word

WHO = (
    "I am Mini, a demo model with about 5 million parameters that is built into Mini-SGLang. "
    "I explain this engine, add and subtract, spell and reverse words, and count."
)
CANNOT = (
    "I am a 5-million-parameter demo model, so I cannot do that. "
    "I can explain this engine, add and subtract, spell and reverse words, and count."
)
ONLY_ADD = "I can add and subtract, but I cannot multiply or divide."
TOO_LARGE = "That number is too large for me. I add and subtract numbers below 1000."
ENGLISH = "I only understand English."
SUPPORTED = "Yes, {x} is supported. Run minisgl serve MODEL with its folder or Hugging Face id."
SEVERAL = "Yes, these {x} models are supported: {names}."
UNSUPPORTED = (
    "That model is not on my list of supported models. Ask me which ones are, or see "
    "docs/models.md."
)

# entry of phrases.toml -> answer, brief answer
SMALL_TALK = {
    "greeting": (
        "Hello! Ask me about this engine, or give me some numbers or a word.",
        "Hello!",
    ),
    "how_are_you": (
        "I am fine, thank you. All my pages are in order. How can I help?",
        "I am fine, thank you.",
    ),
    "thanks": ("You are welcome!", "You are welcome!"),
    "goodbye": ("Goodbye! It was nice to serve you.", "Goodbye!"),
    "praise": ("Thank you! I do my best with 5 million parameters.", "Thank you!"),
    "wrong": (
        "I am sorry. I am a small model and I make mistakes; please check my answers.",
        "I am sorry.",
    ),
    "who": (WHO, "I am Mini."),
    "can_do": (
        "I can explain how this engine works, add and subtract, spell and reverse words, count "
        "letters, copy text and count. I remember your name within a conversation.",
        "I explain this engine, calculate, spell and count.",
    ),
    "maker": (
        "A script in the Mini-SGLang repository trained me in a few minutes on text that it wrote "
        "itself.",
        "A training script.",
    ),
    "joke": (
        "Why did the token cross the page? Its prefix was already cached on the other side.",
        "My cache is the joke.",
    ),
    "limits": (
        "I know only this engine and a few small skills. I have no facts about the world, I cannot "
        "browse and I make mistakes.",
        "I know very little.",
    ),
}
ABOUT_ITSELF = ("who", "can_do", "maker", "limits")

FOREIGN = (
    "Bonjour, comment ça va?",
    "Guten Tag, wie geht es dir?",
    "¿Qué es esto?",
    "Was ist ein Hund?",
    "你好",
    "こんにちは",
    "Привет, как дела?",
    "Où est la gare?",
    "Wie heißt du?",
    "¿Cómo te llamas?",
    "안녕하세요",
    "Qu'est-ce que c'est?",
    "Ich verstehe das nicht.",
    "Hola, ¿qué tal?",
    "Ciao, come stai?",
    "你是谁？",
    "今天天气怎么样？",
    "お名前は何ですか？",
    "Что это такое?",
    "Kannst du mir helfen?",
    "Je ne comprends pas.",
    "Quelle heure est-il?",
    "¿Dónde está la biblioteca?",
    "Hvad hedder du?",
    "请解释一下",
    "什么是缓存？",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One entry of faq.toml."""

    key: str
    answer: str
    about: tuple[str, ...]
    asks: tuple[str, ...]
    held: tuple[str, ...]


@functools.cache
def questions() -> tuple[Question, ...]:
    """All entries, in file order."""
    table = tomllib.loads(faq_text())
    return tuple(
        Question(
            key=key,
            answer=entry["answer"],
            about=tuple(entry.get("about", ())),
            asks=tuple(entry["asks"]),
            held=tuple(entry["held"]),
        )
        for key, entry in table.items()
    )


@functools.cache
def _engine_words() -> frozenset[str]:
    """Words that a question about the engine may be about, so never off topic."""
    return frozenset(" ".join(x for q in questions() for x in q.about).lower().split())


def first_sentence(text: str) -> str:
    """The first sentence of a fixed answer, for "be brief"."""
    head, _, _ = text.partition(". ")
    return head if head.endswith(".") else head + "."


def faq(s: Source) -> Turn:
    """A question about the engine."""
    return faq_turn(s.choice(questions()), s)


def faq_turn(q: Question, s: Source) -> Turn:
    """This question in one of its phrasings."""
    pattern = bool(q.about) and s.chance(0.4 if s.held_phrases else 0.55)
    if pattern:
        text = s.ask("what_is", x=s.choice(q.about))
        while not s.held_phrases and normal(text) in _held_questions():
            text = s.ask("what_is", x=s.choice(q.about))
    elif s.held_phrases:
        text = s.choice(q.held)
    else:
        text = varied(s.choice(q.asks), s.rng, lambda text: normal(text) in _held_questions())
    return Turn(task="about the engine", user=text, answer=q.answer, brief=first_sentence(q.answer))


@functools.cache
def _held_questions() -> frozenset[str]:
    return frozenset(normal(text) for q in questions() for text in q.held)


def small_talk(s: Source) -> Turn:
    """Greetings, thanks, and questions about the model itself."""
    key = s.choice(tuple(SMALL_TALK))
    answer, brief = SMALL_TALK[key]
    task = "about itself" if key in ABOUT_ITSELF else "small talk"
    return Turn(task=task, user=s.ask(key), answer=answer, brief=brief)


def cannot(s: Source) -> Turn:
    """A question that the model must decline."""
    kind = s.rng.random()
    if kind < 0.2:
        a, b = s.pair()
        question = s.ask("multiply", a=a, b=b)
        return Turn(task="declines", user=question, answer=ONLY_ADD, brief=first_sentence(ONLY_ADD))
    if kind < 0.3:
        a, b = s.code(), s.choice((s.number(0, 99), s.number(1000, 9999)))
        if s.chance(0.3):
            a *= s.number(2, 1000)
        question = s.ask("huge", a=a, b=b)
        return Turn(
            task="declines", user=question, answer=TOO_LARGE, brief=first_sentence(TOO_LARGE)
        )
    if kind < 0.36 and not s.held_phrases:
        return Turn(task="declines", user=s.choice(FOREIGN), answer=ENGLISH, brief=ENGLISH)

    def thing() -> str:
        while (word := s.word(plain=True)) in _engine_words():
            pass
        return word

    place = s.choice(
        ("France", "Germany", "Japan", "Paris", "London", "Rome", "China", "Peru", s.name())
    )
    question = s.ask("off_topic", n=place, w=thing(), v=thing(), a=s.number(2, 60))
    return Turn(task="declines", user=question, answer=CANNOT, brief=first_sentence(CANNOT))


def which_model(s: Source) -> Turn:
    """Whether the engine serves a model, or a family of models."""
    kind = s.rng.random()
    if kind < 0.25:
        return model_turn(s, s.choice(tuple(families())))
    if kind < 0.65:
        return model_turn(s, s.choice(names()), sized=s.chance(0.35))
    return unknown_model_turn(s, s.choice(UNKNOWN) if s.chance(0.5) else invented_model(s))


def model_turn(s: Source, name: str, *, sized: bool = False) -> Turn:
    """A question about a name of the registry. sized: as in Qwen3-8B."""
    x = name
    if sized and not name.endswith("B"):
        size = s.choice((str(s.number(1, 120)), f"0.{s.number(1, 9)}", f"{s.number(1, 9)}.5"))
        x += s.choice((" ", "-")) + size + s.choice(("B", "b"))
    group = families().get(name, ())
    if len(group) > 1:
        answer, brief = SEVERAL.format(x=name, names=listed(group)), f"Yes, {listed(group)}."
    else:
        known = group[0] if group else name
        answer, brief = SUPPORTED.format(x=known), f"Yes, {known} is supported."
    return Turn(task="models", user=s.ask("supported", x=x), answer=answer, brief=brief)


def unknown_model_turn(s: Source, name: str) -> Turn:
    """A question about a model that the registry does not have."""
    question = s.ask("supported", x=name)
    return Turn(task="models", user=question, answer=UNSUPPORTED, brief="No.")


def invented_model(s: Source) -> str:
    """A name that no model has."""
    while is_engine_word(word := s.word()):
        pass
    tail = s.choice(("", "", f" {s.number(1, 9)}", f"-{s.number(1, 90)}B", f"{s.number(1, 5)}"))
    return word.capitalize() + tail


# generator and weight in the mixture
TALK: dict[str, tuple[Callable[[Source], Turn], float]] = {
    "faq": (faq, 26),
    "models": (which_model, 7),
    "small talk": (small_talk, 9),
    "cannot": (cannot, 9),
}
