"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Two kinds of models are read: "gpt2", byte-level BPE with merges, whose splitting of text the key
`pre` names; and "llama", sentencepiece's BPE, which has a score for each token in place of merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from minisgl.errors import ConfigError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Types of tokens, in llama.cpp's numbering."""


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """Of cl100k and its heirs, which differ in how many digits stay together and in whether marks
    are letters."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
"""Of o200k: words are split where lower case is followed by upper case."""
SPLITS: Final[Mapping[str, str | None]] = {
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
    "qwen35": _words(r"\p{N}", letters=r"\p{L}\p{M}"),
    "gpt-4o": _O200K,
    "gpt-2": None,
    "smollm": None,
}
"""By `pre`. None: GPT-2's own."""
WHOLE_WORDS: Final = ("llama-bpe", "gpt-4o")
"""Their tokenizers take a word that is a token as it is, whatever its merges are."""


def tokenizer_files(values: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Returns the contents of both files. Raises ConfigError for an unknown kind of tokenizer."""
    get = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in values.items()
        if name.startswith("tokenizer.ggml.")
    }
    tokens: list[str] = get["tokens"]
    kinds = get.get("token_type", [1] * len(tokens))
    model = get["model"]
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(get, path)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(get, kinds), True
    else:
        raise ConfigError(
            f"{path}: tokenizer.ggml.model is {model!r}, expected gpt2 or llama; use the "
            "checkpoint that the file was made from, whose weights are *.safetensors"
        )
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    own = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])
    named = {
        f"{name}_token": tokens[get[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if get.get(f"{key}_token_id", len(tokens)) < len(tokens)
    }
    if get.get("add_bos_token", adds_bos) and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, get["bos_token_id"])],
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=1),
    }


def _byte_level(get: Mapping[str, Any], path: Path) -> tuple[Tokenizer, bool]:
    """Returns also whether it begins texts with a token of its own where no key says so."""
    pre = get.get("pre", "gpt-2")
    if pre not in SPLITS:
        raise ConfigError(
            f"{path}: tokenizer.ggml.pre is {pre!r}, expected {', '.join(SPLITS)}; use the "
            "checkpoint that the file was made from, whose weights are *.safetensors"
        )
    vocab = {token: index for index, token in enumerate(get["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in get["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pattern := SPLITS[pre]:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre == "llama-bpe"


def _sentencepiece(get: Mapping[str, Any], kinds: list[int]) -> Tokenizer:
    """A token's best way to come about is the merge of two tokens, so its score orders merges."""
    tokens, scores = get["tokens"], get["scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for end in range(1, len(token)):
            left, right = token[:end], token[end:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort()
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    pairs = [(left, right) for *_, left, right in merges]
    tokenizer = tokenizers.Tokenizer(
        BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("▁")] if get.get("add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
