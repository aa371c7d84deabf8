"""Small checkpoint folders with real tokenizers, trained here in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "Les élèves mangent des gâteaux; Grüße aus München. naïve café",
    "你好，世界。今天天气很好。 こんにちは世界 안녕하세요",
    "def f(x):\n    return x + 1\n\n\tprint('done')  # 123 456",
    "emoji 😀 👍🏽 👨‍👩‍👧 mixed with text   and   spaces",
] * 3

SAMPLES = [
    "Hello world",
    " leading and trailing ",
    "",
    "\n\n\ttabs\r\n",
    "Grüße, 世界! 😀👍🏽👨‍👩‍👧",
    "<s>special</s> in <|im_end|> text <tool>x</tool>",
    "unseen: Ωμέγα ሰላም 🦜",
    "a" * 300,
    "\u0000\u200b\ufffd",
]

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

KINDS = ["byte_level", "sentencepiece", "metaspace", "gemma"]
STREAMED = [
    "byte_level",
    "metaspace",
    *(
        pytest.param(kind, marks=pytest.mark.needs("minisgl_zoo"))
        for kind in ("sentencepiece", "gemma")
    ),
]
"""The same kinds. The core's stream of the last two shows runs of bytes otherwise."""


def make(folder: Path, kind: str, *, config: dict[str, Any] | None = None) -> Path:
    """Write tokenizer.json and tokenizer_config.json of one kind of tokenizer. Returns the
    folder."""
    tokenizer = {
        "byte_level": _byte_level,
        "sentencepiece": lambda: _byte_fallback(strip=True),
        "gemma": lambda: _byte_fallback(strip=False),
        "metaspace": _unigram,
    }[kind]()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.add_tokens(["<tool>", "</tool>"])  # added, but not special
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        **(config or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_fallback(*, strip: bool) -> Tokenizer:
    """Return a tokenizer like Llama 2's: BPE over ▁, bytes for unknown text. Gemma's has no prefix
    space."""
    scheme = "first" if strip else "never"
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    latin = [text for text in CORPUS if text.isascii() or "é" in text]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    trained.train_from_iterator(latin, trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        stages.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
