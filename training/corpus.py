"""The mixture for training, and the suite for measuring.

Training draws values and phrasings from one side of the split, the suite from the other.
`python -m training.corpus` prints samples.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace

from training.chat import CHATS, STYLES, chat, measured_chat, single, styled
from training.conversation import Conversation, Message, Turn
from training.families import families, names
from training.skills import SKILLS
from training.source import Source
from training.split import SPLIT_SEED
from training.talk import (
    cannot,
    faq_turn,
    free_turns,
    invented_model,
    model_turn,
    questions,
    small_talk,
    unknown_model_turn,
)

SHARES = {"single": 52, "styled": 16, "chat": 28, "raw": 4}


def conversation(s: Source) -> Conversation:
    """One conversation of the mixture."""
    kind = s.rng.choices(tuple(SHARES), tuple(SHARES.values()))[0]
    if kind == "styled":
        return styled(s, s.rng.choices(tuple(STYLES), tuple(STYLES.values()))[0])
    if kind == "chat":
        return chat(s)
    one = single(s)
    return replace(one, raw=True) if kind == "raw" else one


def training_stream(seed: int, part: int) -> Iterator[Conversation]:
    """Endless conversations; parts with different numbers are independent of each other."""
    source = Source(random.Random(f"{seed}/{part}"))
    while True:
        yield conversation(source)


def suite(count: int = 200, seed: int = SPLIT_SEED) -> dict[str, list[Conversation]]:
    """Conversations to measure, by row of the table; `count` of each, fewer where less exists.

    "new values": held-out operands, words, names and codes in taught phrasings.
    "new phrasing": the same and held-out phrasings. "typed freely": free.toml.
    """
    rows: dict[str, list[Conversation]] = {}

    def source(row: str, *, phrases: bool) -> Source:
        rng = random.Random(f"{seed}/suite/{row}")
        return Source(rng, held_values=True, held_phrases=phrases)

    for phrases, label in ((False, "new values"), (True, "new phrasing")):
        for key in SKILLS:
            row = f"{key}, {label}"
            s = source(row, phrases=phrases)
            rows[row] = [single(s, key) for _ in range(count)]
    s = source("about the engine", phrases=True)
    about = [faq_turn(q, s) for q in questions() for _ in range(4)]
    rows["about the engine, new phrasing"] = [_alone(t) for t in about]
    s = source("models", phrases=True)
    known = [model_turn(s, name) for name in (*families(), *names())]
    unknown = [unknown_model_turn(s, invented_model(s)) for _ in range(count)]
    rows["models that are served, new phrasing"] = [_alone(t) for t in known]
    rows["models that are not, new phrasing"] = [_alone(t) for t in unknown]
    for row, draw in (("small talk", small_talk), ("declines", cannot)):
        s = source(row, phrases=True)
        rows[f"{row}, new phrasing"] = [_alone(draw(s)) for _ in range(count)]
    for kind in STYLES:
        s = source(kind, phrases=True)
        conversations = [styled(s, kind) for _ in range(count)]
        rows[f"{conversations[0].task}, new phrasing"] = conversations
    for task in CHATS:
        s = source(task, phrases=True)
        rows[f"chat: {task}, new phrasing"] = [measured_chat(s, task) for _ in range(count)]
    s = source("raw", phrases=True)
    rows["without template, new phrasing"] = [replace(single(s), raw=True) for _ in range(count)]
    rows["typed freely"] = [_alone(t) for t in free_turns()]
    return {row: _distinct(conversations) for row, conversations in rows.items()}


def _alone(t: Turn) -> Conversation:
    return Conversation(
        task=t.task,
        messages=(
            Message(role="user", content=t.user),
            Message(role="assistant", content=t.answer),
        ),
    )


def _distinct(conversations: list[Conversation]) -> list[Conversation]:
    return list({c.prompt: c for c in conversations}.values())


def main() -> None:
    """Prints samples of the training stream."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--count", type=int, default=20, help="samples (default: %(default)s)")
    args = parser.parse_args()
    stream = training_stream(args.seed, 0)
    for _ in range(args.count):
        c = next(stream)
        print(f"--- {c.task}{' (raw)' if c.raw else ''}")
        for message in c.messages:
            print(f"{message.role}: {message.content}")


if __name__ == "__main__":
    main()
