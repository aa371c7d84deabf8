"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Five kinds of tokenizers are supported: "gpt2" is byte-level BPE with merges, and the key `pre`
names how it splits text; "llama" is sentencepiece's BPE, which has a score for each token instead
of merges; "gemma4" is sentencepiece's BPE with merges; "bert" is WordPiece; "t5" is sentencepiece's
unigrams, as XLM-RoBERTa has them. The vocabulary and the merges are written as JSON at once,
because the library would make objects of them first, and write these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.processors import TemplateProcessing

from minisgl.errors import ConfigError
from minisgl.utils.logger import get_logger
from minisgl_zoo.gguf.splits import SPLITS
from minisgl_zoo.gguf.values import CONTROL, UNKNOWN, USE_ORIGINAL, USER_DEFINED

logger = get_logger(__name__)

Merge = tuple[str, str]
PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""These special tokens of Phi-3 keep the space behind them. Its other ones drop it."""


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
    model, vocab = fields["model"], {token: index for index, token in enumerate(tokens)}
    logger.info("converting the tokenizer of %s: %s tokens", path.name, f"{len(tokens):,}")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(fields, path)
    elif model in ("llama", "gemma4"):
        tokenizer, adds_bos = _sentencepiece(fields, tokens, kinds), True
    elif model in ("bert", "t5"):
        return _encoder_files(fields, tokens, kinds)
    else:
        raise ConfigError(
            f"{path}: tokenizer.ggml.model is {model!r}, expected gpt2, llama, gemma4, bert or t5; "
            f"{USE_ORIGINAL}"
        )
    named = _named(fields, tokens, bos="bos", eos="eos")
    begins = fields.get("add_bos_token", adds_bos) and "bos_token" in named
    ends = fields.get("add_eos_token", False) and "eos_token" in named
    if begins or ends:
        added = [name for name, adds in (("bos", begins), ("eos", ends)) if adds]
        bos, eos = (
            f"{named[f'{name}_token']} " if name in added else "" for name in ("bos", "eos")
        )
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos}$A {eos}".strip(),
            pair=f"{bos}$A {eos}{bos}$B {eos}".strip(),
            special_tokens=[(named[f"{x}_token"], fields[f"{x}_token_id"]) for x in added],
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    made = json.loads(tokenizer.to_str())  # without a vocabulary
    is_phi3 = (values.get("general.architecture"), model) == ("phi3", "llama")
    made["added_tokens"] = _added_tokens(tokens, kinds, vocab, is_phi3=is_phi3)
    if model == "llama":
        merges = _scored_merges(tokens, fields["scores"], vocab)
    else:
        merges = _merges(fields, vocab)
    made["model"] |= {"vocab": vocab, "merges": merges}
    return _files(made, config)


def _encoder_files(
    fields: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> dict[str, str]:
    """Return the files of an encoder's tokenizer, whose template has pairs, too.

    WordPiece: the file has "▁" before the first piece of a word, the checkpoint "##" before others.
    """
    is_wordpiece = fields["model"] == "bert"
    if is_wordpiece:
        tokens = [_wordpiece(token) for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    begin, end = (  # older files have the first names, later ones may have the others alone
        fields.get(f"{first}_token_id", fields.get(f"{other}_token_id"))
        for first, other in (("cls", "bos"), ("seperator", "eos"))
    )
    named = _named(fields, tokens, mask="mask")
    named |= {"cls_token": tokens[begin], "sep_token": tokens[end]}
    if is_wordpiece:
        tokenizer = Tokenizer(WordPiece(unk_token=named["unk_token"]))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    else:
        tokenizer = Tokenizer(Unigram())
        charsmap = bytes(fields["precompiled_charsmap"])
        tokenizer.normalizer = normalizers.Precompiled(charsmap)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        tokenizer.decoder = decoders.Metaspace()
    sep = named["sep_token"]
    second = f"$B:1 {sep}:1" if is_wordpiece else f"{sep} $B {sep}"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{named['cls_token']} $A {sep}",
        pair=f"{named['cls_token']} $A {sep} {second}",
        special_tokens=[(named["cls_token"], begin), (sep, end)],
    )
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = _added_tokens(tokens, kinds, vocab, is_phi3=False)
    if is_wordpiece:
        made["model"]["vocab"] = vocab
    else:
        scored = list(zip(tokens, fields["scores"], strict=True))
        made["model"] |= {"vocab": scored, "unk_id": fields["unknown_token_id"]}
    return _files(made, {"tokenizer_class": "PreTrainedTokenizerFast", **named})


def _named(fields: Mapping[str, Any], tokens: Sequence[str], **names: str) -> dict[str, str]:
    """Return tokenizer_config.json's special tokens. names: of a token -> the file's name of it."""
    names |= {"unk": "unknown", "pad": "padding"}
    return {
        f"{name}_token": tokens[fields[f"{key}_token_id"]]
        for name, key in names.items()
        if fields.get(f"{key}_token_id", len(tokens)) < len(tokens)
    }


def _wordpiece(token: str) -> str:
    if token.startswith("▁"):
        return token[1:]
    return token if token.startswith("[") and token.endswith("]") else f"##{token}"


def _files(made: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    return {
        "tokenizer.json": msgspec.json.encode(made).decode(),
        "tokenizer_config.json": json.dumps(config, indent=1),
    }


def _added_tokens(
    tokens: Sequence[str], kinds: Sequence[int], vocab: Mapping[str, int], *, is_phi3: bool
) -> list[dict[str, Any]]:
    """Return tokenizer.json's `added_tokens`, which text is searched for first: special ones, and
    those that the model's makers defined."""
    added: dict[str, dict[str, Any]] = {}
    for wanted in (CONTROL, USER_DEFINED):
        is_special = wanted == CONTROL
        for token, kind in zip(tokens, kinds, strict=True):
            if kind == wanted and token:
                added[token] = {
                    "id": vocab[token],
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": is_special and is_phi3 and token not in PHI3_PLAIN,
                    "normalized": False,
                    "special": is_special,
                }
    return sorted(added.values(), key=lambda token: int(token["id"]))


def _byte_level(fields: Mapping[str, Any], path: Path) -> tuple[Tokenizer, bool]:
    """Return the tokenizer without its vocabulary, and whether texts begin with a BOS token if no
    key says otherwise."""
    pre = fields.get("pre", "gpt-2")
    if pre not in SPLITS:
        raise ConfigError(
            f"{path}: tokenizer.ggml.pre is {pre!r}, expected {', '.join(SPLITS)}; {USE_ORIGINAL}"
        )
    split = SPLITS[pre]
    tokenizer = Tokenizer(BPE(ignore_merges=split.whole))
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    if normalizer := split.normalizer():
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.bos


def _merges(fields: Mapping[str, Any], vocab: Mapping[str, int]) -> list[Merge]:
    """Return the file's merges. Raises ValueError for one whose parts are no tokens."""
    merges = []
    for merge in fields["merges"]:
        left, right = merge.split(" ")
        for token in (left, right, left + right):
            if token not in vocab:
                raise ValueError(f"the merge {merge!r}: `{token}` out of vocabulary")
        merges.append((left, right))
    return merges


def _scored_merges(
    tokens: Sequence[str], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[Merge]:
    """Return the merges that follow from scores.

    Each pair of tokens that together are a token is a merge. They are ordered by the score of that
    token, the highest first, and then by the ids of the pair.
    """
    merges: list[Merge] = []
    scored = sorted(zip(scores, tokens, strict=True), key=itemgetter(0), reverse=True)
    for _, equal in groupby(scored, key=itemgetter(0)):
        pairs = [
            (left, right)
            for _, token in equal
            for end in range(1, len(token))
            if (left := token[:end]) in vocab and (right := token[end:]) in vocab
        ]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


def _sentencepiece(
    fields: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> Tokenizer:
    """Return the tokenizer without its vocabulary."""
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(BPE(unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = fields.get("add_space_prefix", fields["model"] == "llama")
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
