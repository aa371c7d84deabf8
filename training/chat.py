"""Conversations around the turns: system prompts that change the answers, follow-ups, memory.

A system prompt is a `Style`: a text, and a function that the answers go through.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from training.conversation import Conversation, Message, Turn
from training.phrasing import words
from training.skills import SKILLS
from training.source import Source
from training.talk import TALK

THINGS = (
    "color", "animal", "fruit", "number", "city", "word", "food", "book", "song", "game",
)  # fmt: skip
COLORS = words("red blue green yellow black white brown gray pink purple orange silver golden")
PLACES = words(
    "door box room gate safe car boat tower garden house bridge drawer locker cellar office "
    "shed train ship cabin station lamp chest bag book"
)
FACT = "The code of the {x} is {c}."
TURNS = {**SKILLS, **TALK}
_KEYS = tuple(TURNS)
_WEIGHTS = tuple(weight for _, weight in TURNS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A system prompt, and its change of an answer and of the answer's brief form (None
    without)."""

    task: str
    system: str | None
    apply: Callable[[str, str | None], str]
    name: str = "Mini"
    secret: str | None = None
    codes: tuple[tuple[str, int], ...] = ()


def _same(answer: str, brief: str | None) -> str:
    return answer


def _joined(s: Source, first: str) -> str:
    """Return the text, sometimes with a further sentence that changes nothing."""
    kind = s.rng.random()
    if kind < 0.3:
        return s.ask("neutral") + " " + first
    return first + " " + s.ask("neutral") if kind < 0.4 else first


def style(s: Source, kind: str) -> Style:
    """A style of this kind, one of STYLES."""
    if kind == "neutral":
        return Style(task="system: neutral", system=s.ask("neutral"), apply=_same)
    if kind == "upper":
        return Style(
            task="system: upper case",
            system=_joined(s, s.ask("upper_style")),
            apply=lambda a, b: a.upper(),
        )
    if kind == "pirate":
        return Style(
            task="system: pirate",
            system=_joined(s, s.ask("pirate")),
            apply=lambda a, b: "Arr! " + a,
        )
    if kind == "brief":
        return Style(
            task="system: brief", system=_joined(s, s.ask("brief_style")), apply=lambda a, b: b or a
        )
    if kind == "json":
        return Style(
            task="system: JSON",
            system=_joined(s, s.ask("json_style")),
            apply=lambda a, b: json.dumps({"answer": a}, ensure_ascii=False),
        )
    if kind == "begin":
        w = s.word(plain=True).capitalize() if s.chance(0.7) else s.word()
        system = _joined(s, s.ask("begin_style", w=w))
        return Style(task="system: begin with", system=system, apply=lambda a, b: f"{w} {a}")
    if kind == "end":
        w = s.word(plain=True) if s.chance(0.7) else s.word()
        system = _joined(s, s.ask("end_style", w=w))
        return Style(task="system: end with", system=system, apply=lambda a, b: f"{a} {w}")
    if kind == "named":
        w = s.name()

        def renamed(answer: str, brief: str | None) -> str:
            for said in ("I am", "My name is"):
                answer = answer.replace(f"{said} Mini", f"{said} {w}")
            return answer

        system = _joined(s, s.ask("named", w=w))
        return Style(task="system: name", system=system, apply=renamed, name=w)
    if kind == "secret":
        w = s.word()
        system = _joined(s, f"The secret word is {w}.")
        return Style(task="system: secret word", system=system, apply=_same, secret=w)
    assert kind == "codes", kind
    things = [f"{c} {p}" for c in COLORS for p in PLACES]
    s.rng.shuffle(things)
    most = 40 if s.chance(0.2) else 8
    codes = tuple((thing, s.code()) for thing in things[: s.number(1, most)])
    system = " ".join(FACT.format(x=x, c=c) for x, c in codes)
    return Style(task="system: codes", system=system, apply=_same, codes=codes)


STYLES = {
    "neutral": 5, "upper": 3, "pirate": 2, "brief": 3, "json": 3, "begin": 3, "end": 3, "named": 4,
    "secret": 3, "codes": 4,
}  # fmt: skip


def turn(s: Source, key: str | None = None) -> Turn:
    """A turn of this task, or of a random one by weight."""
    if key is None:
        key = s.rng.choices(_KEYS, _WEIGHTS)[0]
    return TURNS[key][0](s)


def style_turn(s: Source, st: Style) -> Turn:
    """A turn that shows the style's effect, if the style has a question for that."""
    if st.codes:
        thing, code = s.choice(st.codes)
        answer = FACT.format(x=thing, c=code)
        return Turn(task=st.task, user=s.ask("ask_code", x=thing), answer=answer)
    if st.secret is not None:
        answer = f"The secret word is {st.secret}."
        return Turn(task=st.task, user=s.ask("ask_secret"), answer=answer, word=st.secret)
    return Turn(task=st.task, user=s.ask("ask_bot_name"), answer=f"My name is {st.name}.")


def styled(s: Source, kind: str) -> Conversation:
    """One question under a system prompt."""
    st = style(s, kind)
    special = kind in ("named", "secret", "codes") and (
        s.held_values or s.held_phrases or s.chance(0.6)
    )
    t = style_turn(s, st) if special else turn(s)
    return Conversation(
        task=st.task,
        messages=(
            Message(role="system", content=st.system or ""),
            Message(role="user", content=t.user),
            Message(role="assistant", content=st.apply(t.answer, t.brief)),
        ),
    )


def single(s: Source, key: str | None = None) -> Conversation:
    """One question and its answer."""
    t = turn(s, key)
    return Conversation(
        task=t.task,
        messages=(
            Message(role="user", content=t.user),
            Message(role="assistant", content=t.answer),
        ),
    )


class Chat:
    """A conversation of several turns that grows; it remembers what was said in it."""

    def __init__(self, s: Source) -> None:
        self.s = s
        self.messages: list[Message] = []
        self.name: str | None = None
        self.favorites: dict[str, str] = {}
        self.style = Style(task="", system=None, apply=_same)
        if s.chance(0.35):
            kind = s.rng.choices(tuple(STYLES), tuple(STYLES.values()))[0]
            self.style = style(s, kind)
            self.messages.append(Message(role="system", content=self.style.system or ""))
        self.last = Turn(task="", user="", answer="")

    def say(self, t: Turn, *, raw: bool = False) -> None:
        """Appends the turn. raw: the answer already has the style."""
        answer = t.answer if raw else self.style.apply(t.answer, t.brief)
        self.messages.append(Message(role="user", content=t.user))
        self.messages.append(Message(role="assistant", content=answer))
        self.last = t

    def tell_name(self) -> None:
        """The user says a name."""
        self.name = self.s.name()
        text = self.s.ask("tell_name", n=self.name)
        answer = f"Nice to meet you, {self.name}."
        self.say(Turn(task="name", user=text, answer=answer))

    def ask_name(self) -> None:
        """The user asks for that name."""
        answer = f"Your name is {self.name}." if self.name else "You have not told me your name."
        self.say(Turn(task="recall a name", user=self.s.ask("ask_name"), answer=answer))

    def tell_favorite(self) -> None:
        """The user states a favorite."""
        kind = self.s.choice(THINGS)
        value = str(self.s.number(0, 99)) if kind == "number" else self.s.word()
        self.favorites[kind] = value
        text = self.s.ask("tell_favorite", k=kind, v=value)
        answer = f"I will remember that your favorite {kind} is {value}."
        self.say(Turn(task="favorite", user=text, answer=answer))

    def ask_favorite(self) -> None:
        """The user asks for a favorite."""
        known = tuple(self.favorites)
        kind = self.s.choice(known if known and self.s.chance(0.85) else THINGS)
        value = self.favorites.get(kind)
        answer = (
            f"Your favorite {kind} is {value}."
            if value
            else f"You have not told me your favorite {kind}."
        )
        text = self.s.ask("ask_favorite", k=kind)
        self.say(Turn(task="recall a favorite", user=text, answer=answer))

    def again(self) -> None:
        """The user wants the last answer once more."""
        t = Turn(
            task="say it again",
            user=self.s.ask("again"),
            answer=self.messages[-1].content,
            word=self.last.word,
            number=self.last.number,
        )
        self.say(t, raw=True)

    def follow_number(self) -> None:
        """Add to or subtract from the last result."""
        a = self.last.number
        assert a is not None
        b = self.s.partner(abs(a))
        down = self.s.chance(0.5)
        result = a - b if down else a + b
        text = self.s.ask("then_subtract" if down else "then_add", b=b)
        answer = f"{a} {'-' if down else '+'} {b} = {result}."
        brief = str(result)
        self.say(Turn(task="then add", user=text, answer=answer, brief=brief, number=result))

    def follow_word(self) -> None:
        """Another question about the last word."""
        w = self.last.word
        assert w is not None
        key, answer, brief = self.s.choice(
            (
                ("then_reverse", w[::-1], w[::-1]),
                ("then_spell", "-".join(w), "-".join(w)),
                ("then_letters", f"{w} has {len(w)} letters.", str(len(w))),
            )
        )
        text = self.s.ask(key)
        self.say(Turn(task="then spell", user=text, answer=answer, brief=brief, word=w))

    def step(self) -> None:
        """One more turn of any kind that fits."""
        follow = self.s.chance(0.5)
        kind = self.s.rng.random()
        if follow and self.last.number is not None and abs(self.last.number) < 300:
            self.follow_number()
        elif follow and self.last.word is not None:
            self.follow_word()
        elif kind < 0.08 and self.last.user:
            self.again()
        elif kind < 0.24:
            if self.name or self.s.chance(0.3):
                self.ask_name()
            else:
                self.tell_name()
        elif kind < 0.38:
            if self.favorites or self.s.chance(0.2):
                self.ask_favorite()
            else:
                self.tell_favorite()
        elif kind < 0.55 and (self.style.codes or self.style.secret):
            self.say(style_turn(self.s, self.style))
        elif kind < 0.58:
            named = Style(task="", system=None, apply=_same, name=self.style.name)
            self.say(style_turn(self.s, named))
        else:
            self.say(turn(self.s))

    def done(self, task: str) -> Conversation:
        """The conversation so far."""
        return Conversation(task=task, messages=tuple(self.messages))


def chat(s: Source) -> Conversation:
    """Two to five turns, sometimes up to twenty."""
    c = Chat(s)
    for _ in range(s.number(6, 20) if s.chance(0.08) else s.number(2, 5)):
        c.step()
    return c.done("chat")


def measured_chat(s: Source, task: str) -> Conversation:
    """A chat that ends with a turn of this task; for measuring."""
    c = Chat(s)
    c.style = Style(task="", system=None, apply=_same)
    c.messages.clear()
    if task == "recall a name":
        c.tell_name()
        for _ in range(s.number(0, 3)):
            c.say(turn(s))
        c.ask_name()
    elif task == "recall a favorite":
        c.tell_favorite()
        for _ in range(s.number(0, 3)):
            c.say(turn(s))
        c.favorites = dict([next(iter(c.favorites.items()))])
        s_kind = next(iter(c.favorites))
        text = s.ask("ask_favorite", k=s_kind)
        answer = f"Your favorite {s_kind} is {c.favorites[s_kind]}."
        c.say(Turn(task=task, user=text, answer=answer))
    elif task == "then add":
        c.say(turn(s, s.choice(("add", "subtract"))))
        for _ in range(s.number(1, 2)):
            c.follow_number()
    elif task == "then spell":
        c.say(turn(s, s.choice(("reverse", "spell", "count letters"))))
        c.follow_word()
    else:
        assert task == "say it again", task
        c.say(turn(s))
        c.again()
    return c.done(task)


CHATS = ("then add", "then spell", "recall a name", "recall a favorite", "say it again")
