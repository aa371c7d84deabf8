"""Turns with fixed answers: questions about the engine, small talk, and refusals."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass

from training.conversation import Turn
from training.families import UNKNOWN, families, listed, names
from training.phrasing import free, is_free, normal, phrases, sentence, varied
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
TWO_NUMBERS = "I add or subtract two whole numbers at a time."
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
    "math": (
        "I add and subtract two whole numbers below 1000 at a time. I cannot multiply or divide.",
        "I add and subtract.",
    ),
    "ask_bot_name": ("My name is Mini.", "Mini."),
    "more": ("That is all that I know about it. The folder docs says more.", "That is all."),
    "ack": ("OK. Ask me about this engine, or give me some numbers or a word.", "OK."),
    "limits": (
        "I know only this engine and a few small skills. I have no facts about the world, I cannot "
        "browse and I make mistakes.",
        "I know very little.",
    ),
}
ABOUT_ITSELF = ("who", "can_do", "maker", "limits")

# with choices, as in phrases.toml
FOREIGN = (
    "(Bonjour|Salut)(, comment ça va?|, ça va?| mon ami!| à tous|)",
    "(Où|Quand|Comment|Pourquoi) est (la gare|le roi|la maison|ton nom|il parti|le serveur)?",
    "(Qu'est-ce que c'est|Quelle heure est-il|Tu parles français|Parlez-vous français)?",
    "(Je ne comprends pas|Merci beaucoup|Il fait beau|Je cherche un modèle|C'est la vie).",
    "(Peux-tu|Pouvez-vous) (m'aider|expliquer le cache|écrire un poème|parler français)?",
    "(Guten Tag|Hallo|Guten Morgen|Servus)(, wie geht es dir?|, wie geht's?| zusammen!| Mini.|)",
    "(Was|Wer|Wo|Wie) (ist|war|heißt|macht) (das|der Hund|die Frau|dein Name|ein Tensor|der Mann)?",
    "(Kannst du|Könntest du|Willst du) (mir helfen|Deutsch sprechen|das erklären|rechnen)?",
    "(Ich verstehe das nicht|Danke schön|Das ist falsch|Erzähl mir einen Witz|Auf Wiedersehen).",
    "(Wie viel|Was) (ist|sind|ergibt) {a} (plus|minus|mal|und) {b}?",
    "(Welche|Wie viele) (Modelle|Sprachen|Karten) (kannst|kennst|hast) du?",
    "(Hola|Buenos días|Buenas tardes)(, ¿qué tal?|, ¿cómo estás?| amigo!| a todos|)",
    "¿(Qué|Quién|Dónde|Cómo|Cuándo) (es|está|son) (esto|la biblioteca|tu nombre|el perro|eso)?",
    "¿(Cómo te llamas|Puedes ayudarme|Qué puedes hacer|Entiendes español|Cuánto es {a} más {b})?",
    "(No entiendo|Muchas gracias|Hasta luego|Cuéntame un chiste|Escribe un cuento).",
    "(Ciao|Buongiorno|Salve)(, come stai?|, come va?| a tutti| a te!)",
    "(Come ti chiami|Che cosa è questo|Dove sei|Puoi aiutarmi|Quanto fa {a} più {b})?",
    "(Olá|Bom dia|Oi)(, tudo bem?|, como vai?|!|)",
    "(O que é isto|Você fala português|Qual é o seu nome|Onde fica o banco|Obrigado)?",
    "(Hvad hedder du|Hur mår du|Vad är det här|Hvor er du|Kan du hjælpe mig|Snakker du norsk)?",
    "(Goedemorgen|Dag|Hoe gaat het|Wat is dit|Spreek je Nederlands|Kun je me helpen)?",
    "(Merhaba|Nasılsın|Adın ne|Bu nedir|Türkçe biliyor musun|Teşekkür ederim)(?|.)",
    "(Dzień dobry|Jak się masz|Co to jest|Czy mówisz po polsku|Dziękuję bardzo)(?|.)",
    "(Привет|Здравствуйте)(, как дела?|!|, кто ты?|, друг|)",
    "(Что|Кто|Где) (это|это такое|твой дом|ты такой|находится Москва)?",
    "(Ты говоришь по-русски|Помоги мне|Расскажи шутку|Спасибо большое|Я не понимаю)(?|.)",
    "(你好|您好|早上好)(！|，你是谁？|吗？|，请问|)",
    "(什么是|请解释|告诉我)(缓存|人工智能|天气|你的名字|一个笑话|模型|引擎)(？|。|)",
    "(今天天气怎么样|你会说中文吗|你能做什么|谢谢|再见|写一首诗|我不明白)(？|。|)",
    "(こんにちは|おはよう|こんばんは)(！|、元気ですか？|。|)",
    "(お名前は何ですか|これは何ですか|日本語を話せますか|ありがとう|手伝ってください)(？|。|)",
    "(안녕하세요|안녕)(!|, 이름이 뭐예요?|?|)",
    "(이것은 무엇입니까|한국어 할 수 있어요|감사합니다|도와주세요|날씨가 어때요)(?|.|)",
    "(مرحبا|السلام عليكم|كيف حالك|ما اسمك|هل تتكلم العربية|شكرا)(؟|)",
    "(नमस्ते|आप कैसे हैं|तुम्हारा नाम क्या है|क्या आप हिंदी बोलते हैं|धन्यवाद)(?|)",
    "(שלום|Γειά σου|Τι είναι αυτό|Xin chào|Bạn là ai|Halo, apa kabar|Habari gani)(?|)",
)
FOREIGN_HELD = (
    "Comment tu t'appelles?",
    "Was kannst du alles?",
    "¿De dónde eres?",
    "Was ist ein Hund?",
    "Quel temps fait-il?",
    "Come si dice cane in inglese?",
    "Сколько тебе лет?",
    "你叫什么名字？",
    "今日は何曜日ですか？",
    "무엇을 도와줄 수 있어요?",
    "Ik begrijp het niet.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One entry of faq.toml."""

    key: str
    answer: str
    about: tuple[str, ...]
    feature: tuple[str, ...]
    do: tuple[str, ...]
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
            feature=tuple(entry.get("feature", ())),
            do=tuple(entry.get("do", ())),
            asks=tuple(entry["asks"]),
            held=tuple(entry["held"]),
        )
        for key, entry in table.items()
    )


@functools.cache
def _taken_words() -> frozenset[str]:
    """Words that may be a question by themselves, about the engine or in small talk: none of them
    is off topic."""
    asked = [x for q in questions() for x in (*q.about, *q.feature)]
    asked += [x for key in (*SMALL_TALK, "again", "ask_name") for x in phrases()[key].train]
    return frozenset(re.findall("[a-z]+", " ".join(asked).lower()))


def first_sentence(text: str) -> str:
    """The first sentence of a fixed answer, for "be brief"."""
    head, _, _ = text.partition(". ")
    return head if head.endswith(".") else head + "."


def faq(s: Source) -> Turn:
    """A question about the engine."""
    return faq_turn(s.choice(questions()), s)


def faq_turn(q: Question, s: Source) -> Turn:
    """This question in one of its phrasings."""
    patterns = [("what_is", q.about), ("feature", q.feature), ("how_to", q.do)]
    patterns = [(key, values) for key, values in patterns if values]
    text = ""
    while not text or (not s.held_phrases and _is_held_question(text)):
        if patterns and s.chance(0.4 if s.held_phrases else 0.6):
            key, values = s.choice(patterns)
            text = s.ask(key, x=s.choice(values))
        elif s.held_phrases:
            text = s.choice(q.held)
        else:
            text = varied(sentence(s.choice(q.asks), s.rng), s.rng, _is_held_question)
    return Turn(task="about the engine", user=text, answer=q.answer, brief=first_sentence(q.answer))


@functools.cache
def _held_questions() -> frozenset[str]:
    return frozenset(normal(text) for q in questions() for text in q.held)


def _is_held_question(text: str) -> bool:
    return normal(text) in _held_questions() or is_free(text)


def small_talk(s: Source) -> Turn:
    """Greetings, thanks, and questions about the model itself."""
    key = s.choice(tuple(SMALL_TALK))
    answer, brief = SMALL_TALK[key]
    task = "about itself" if key in ABOUT_ITSELF else "small talk"
    return Turn(task=task, user=s.ask(key), answer=answer, brief=brief)


DECLINED = {
    "cannot": CANNOT,
    "multiply": ONLY_ADD,
    "two_numbers": TWO_NUMBERS,
    "english": ENGLISH,
}


def free_turns() -> list[Turn]:
    """The questions of free.toml with the answers of their lessons."""
    lessons, exact = free()
    fixed = {**DECLINED, **{key: answer for key, (answer, _) in SMALL_TALK.items()}}
    fixed |= {q.key: q.answer for q in questions()}
    pairs = [(text, fixed[key]) for key, asked in lessons.items() for text in asked]
    return [Turn(task="typed freely", user=x, answer=y) for x, y in (*pairs, *exact.items())]


def cannot(s: Source) -> Turn:
    """A question that the model must decline."""
    kind = s.rng.random()
    if kind < 0.16:
        a, b = s.pair()
        return _declined(s.ask("multiply", a=a, b=b), ONLY_ADD)
    if kind < 0.24:
        a, b = s.code(), s.choice((s.number(0, 99), s.number(1000, 9999)))
        if s.chance(0.3):
            a *= s.number(2, 1000)
        return _declined(s.ask("huge", a=a, b=b), TOO_LARGE)
    if kind < 0.31:
        a, b = s.pair()
        return _declined(
            s.ask("two_numbers", a=a, b=b, c=s.number(0, 99), d=s.number(1, 9)), TWO_NUMBERS
        )
    if kind < 0.37:
        return _declined(s.ask("english"), ENGLISH)
    if kind < 0.46:
        return _declined(foreign(s), ENGLISH)

    def thing() -> str:
        while (word := s.word(plain=True)) in _taken_words():
            pass
        return word

    place = s.choice(
        ("France", "Germany", "Japan", "Paris", "London", "Rome", "China", "Peru", s.name())
    )
    question = s.ask("off_topic", n=place, w=thing(), v=thing(), a=s.number(2, 60))
    return _declined(question, CANNOT)


def _declined(question: str, answer: str) -> Turn:
    return Turn(task="declines", user=question, answer=answer, brief=first_sentence(answer))


def foreign(s: Source) -> str:
    """A sentence in another language."""
    if s.held_phrases:
        return s.choice(FOREIGN_HELD)
    while True:
        text = sentence(s.choice(FOREIGN), s.rng).format(a=s.number(0, 99), b=s.number(0, 99))
        if s.chance(0.25):
            text = text.rstrip(".?!")
        if s.chance(0.2):
            text = text.lower()
        held = [h for h in FOREIGN_HELD if h.lower().startswith(text.lower())]
        if not held and not is_free(text):
            return text


def which_model(s: Source) -> Turn:
    """Whether the engine serves a model, or a family of models."""
    kind = s.rng.random()
    if kind < 0.25:
        return model_turn(s, s.choice(tuple(families())))
    if kind < 0.65:
        return model_turn(s, s.choice(names()), sized=s.chance(0.35))
    return unknown_model_turn(s, s.choice(UNKNOWN) if s.chance(0.5) else invented_model(s))


def model_turn(s: Source, name: str, *, sized: bool = False) -> Turn:
    """A question about a model that is served. sized: as in Qwen3-8B."""
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
    """A question about a model that is not served."""
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
    "faq": (faq, 36),
    "models": (which_model, 7),
    "small talk": (small_talk, 12),
    "cannot": (cannot, 12),
}
