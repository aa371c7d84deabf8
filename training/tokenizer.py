"""Builds the tokenizer: whole words for prose, single bytes for everything else.

A model that must spell and reverse words it has never seen has to see their letters, and one that
speaks in sentences should not spell them. So the vocabulary is 256 bytes plus the words that are
frequent in the corpus, and there are no merges: a piece of text is either one known word or its
bytes (`ignore_merges` in the tokenizers library). Digits and signs stand alone. Held-out words are
never in the vocabulary.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import re
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from training.conversation import Conversation
from training.corpus import training_stream
from training.phrasing import PHRASES_FILE
from training.source import common_words, engine_words, is_reserved_name, is_reserved_word

VOCAB_SIZE = 1408  # holds the prose words and hardly any others; divisible by 8 ranks and more
NUM_SAMPLES = 60_000  # conversations that are counted
MIN_ANSWERS = 40  # times in answers, for words that no file holds; keeps out typing errors
MAX_POSITIONS = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = SPECIAL
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s"
ASCII_PATTERN = re.compile(r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]|\s")  # PATTERN on ASCII text
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- elif message['content'] %}
{%- for part in message['content'] %}
{{- part['text'] if part['type'] == 'text' else '' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def frequent_pieces(limit: int, seed: int = 0) -> list[str]:
    """The pieces of more than one character that save the most tokens, most useful first."""
    counts: collections.Counter[str] = collections.Counter()
    answered: collections.Counter[str] = collections.Counter()
    for c in itertools.islice(training_stream(seed, -1), NUM_SAMPLES):
        for message in c.messages:
            pieces = ASCII_PATTERN.findall(message.content)
            counts.update(pieces)
            if message.role == "assistant":
                answered.update(pieces)
    common = frozenset(common_words())
    prose = " ".join((*engine_words(), PHRASES_FILE.read_text(encoding="ascii")))
    written = frozenset(re.findall(r"[a-z]+", prose.lower()))

    def allowed(piece: str) -> bool:
        word = piece.strip().lower()
        if len(piece) == 1 or is_reserved_name(word) or (word in common and is_reserved_word(word)):
            return False
        return word in written or answered[piece] >= MIN_ANSWERS

    saved = {p: n * (len(p) - 1) for p, n in counts.items() if allowed(p)}
    return sorted(saved, key=lambda p: (-saved[p], p))[:limit]


def build(pieces: list[str]) -> Tokenizer:
    """A tokenizer with these pieces, 256 bytes and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [to_bytes.pre_tokenize_str(piece)[0][0] for piece in pieces]
    names = list(dict.fromkeys([*SPECIAL, *alphabet, *words]))
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START, END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


class Encoder:
    """Encodes conversations with a loss mask; a cache of pieces makes it fast enough to train from.

    Its result is that of the chat template and the tokenizer; a test compares them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        def ids(name: str) -> int:
            found = tokenizer.token_to_id(name)
            assert found is not None, name
            return found

        self.pad, self.start, self.end = (ids(name) for name in SPECIAL)
        self.newline = tokenizer.encode("\n").ids[0]
        encode = functools.lru_cache(maxsize=100_000)(
            lambda text: tuple(tokenizer.encode(text).ids)
        )
        self._whole = encode
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        byte_ids = {name: ids(name) for name in pre_tokenizers.ByteLevel.alphabet()}
        self._letters = functools.lru_cache(maxsize=100_000)(
            lambda text: tuple(byte_ids[c] for c in to_bytes.pre_tokenize_str(text)[0][0])
        )

    def text(self, text: str) -> list[int]:
        """Token ids of plain text."""
        if not text.isascii():
            return list(self._whole(text))
        return [i for piece in ASCII_PATTERN.findall(text) for i in self._whole(piece)]

    def spelled(self, text: str, share: float, rng: Random) -> list[int]:
        """Token ids with this share of the pieces as single bytes, as if the words were unknown."""
        if not text.isascii():
            return self.text(text)
        pieces = ASCII_PATTERN.findall(text)
        encode = self._letters, self._whole
        return [i for piece in pieces for i in encode[rng.random() >= share](piece)]

    def prompt(self, c: Conversation) -> list[int]:
        """Token ids up to the last answer."""
        if c.raw:
            return self.text(c.prompt[0].content)
        ids: list[int] = []
        for m in c.prompt:
            ids += [self.start, *self.text(m.role), self.newline, *self.text(m.content)]
            ids += [self.end, self.newline]
        return [*ids, self.start, *self.text("assistant"), self.newline]

    def conversation(
        self, c: Conversation, *, share: float = 0.0, rng: Random | None = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids and, for each, whether it is to be learned.

        share: of the words in prompts that are spelled in bytes, with rng.
        """
        ids: list[int] = []
        learned: list[bool] = []
        for m in c.messages:
            answer = m.role == "assistant"
            if answer or rng is None or not share:
                body = self.text(m.content)
            else:
                body = self.spelled(m.content, share, rng)
            if c.raw:
                part = [self.newline, *body, self.end] if answer else body
                ids += part
                learned += [answer] * len(part)
                continue
            head = [self.start, *self.text(m.role), self.newline]
            ids += [*head, *body, self.end, self.newline]
            learned += [False] * len(head) + [answer] * (len(body) + 1) + [False]
        return ids, learned


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    """Builds the tokenizer and prints its size and least useful words."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pieces = frequent_pieces(VOCAB_SIZE - 256 - len(SPECIAL))
    tokenizer = build(pieces)
    save(tokenizer, args.out)
    print(f"{tokenizer.get_vocab_size()} tokens; least useful words: {pieces[-12:]}")


if __name__ == "__main__":
    main()
