"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Three kinds of tokenizers are supported: "gpt2" is byte-level BPE with merges, and the key `pre`
names how it splits text; "llama" is sentencepiece's BPE, which has a score for each token instead
of merges; "gemma4" is sentencepiece's BPE with merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from minisgl.errors import ConfigError
from minisgl.utils.gguf.splits import SPLITS
from minisgl.utils.gguf.values import CONTROL, UNKNOWN, USE_ORIGINAL, USER_DEFINED

PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that keep the space behind them. Its other special tokens drop it."""


def tokenizer_files(values: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the contents of both files, by name. Raises ConfigError for an unknown kind of
    tokenizer, ValueError for a merge whose parts are no tokens."""
    fields = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in values.items()
        if name.startswith("tokenizer.ggml.")
    }
    tokens: list[str] = fields["tokens"]
    kinds = fields.get("token_type", [1] * len(tokens))
    model = fields["model"]
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(fields, path)
    elif model in ("llama", "gemma4"):
        tokenizer, adds_bos = _sentencepiece(fields, kinds), True
    else:
        raise ConfigError(
            f"{path}: tokenizer.ggml.model is {model!r}, expected gpt2, llama or gemma4; "
            f"{USE_ORIGINAL}"
        )
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    is_phi3 = (values.get("general.architecture"), model) == ("phi3", "llama")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, rstrip=is_phi3 and token not in PHI3_PLAIN)
            for token in special
        ]
    )
    own = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])
    named = {
        f"{name}_token": tokens[fields[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if fields.get(f"{key}_token_id", len(tokens)) < len(tokens)
    }
    if fields.get("add_bos_token", adds_bos) and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, fields["bos_token_id"])],
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=1),
    }


def _byte_level(fields: Mapping[str, Any], path: Path) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether texts begin with a BOS token if no key says otherwise."""
    pre = fields.get("pre", "gpt-2")
    if pre not in SPLITS:
        raise ConfigError(
            f"{path}: tokenizer.ggml.pre is {pre!r}, expected {', '.join(SPLITS)}; {USE_ORIGINAL}"
        )
    split = SPLITS[pre]
    tokenizer = Tokenizer(_bpe(_vocab(fields), _merges(fields), ignore_merges=split.whole))
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    if normalizer := split.normalizer():
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.bos


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab, merges, **options)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(str(error)) from error


def _vocab(fields: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(fields["tokens"])}


def _merges(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    parts = (merge.split(" ") for merge in fields["merges"])
    return [(left, right) for left, right in parts]


def _sentencepiece(fields: Mapping[str, Any], kinds: list[int]) -> Tokenizer:
    """Return the tokenizer. If the file has no merges, they follow from the scores.

    Each pair of tokens that together are a token is a merge. They are ordered by the score of that
    token, the highest first.
    """
    tokens, vocab = fields["tokens"], _vocab(fields)
    if fields["model"] == "llama":
        found: list[tuple[float, int, int, str, str]] = []
        for token, score in zip(tokens, fields["scores"], strict=True):
            for end in range(1, len(token)):
                left, right = token[:end], token[end:]
                if left in vocab and right in vocab:
                    found.append((-score, vocab[left], vocab[right], left, right))
        pairs = [(left, right) for *_, left, right in sorted(found)]
    else:
        pairs = _merges(fields)
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    tokenizer = tokenizers.Tokenizer(
        _bpe(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = fields.get("add_space_prefix", fields["model"] == "llama")
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
