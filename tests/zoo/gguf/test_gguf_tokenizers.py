"""Tokenizers of GGUF files: how each splits text, and ids against transformers' own tokenizers."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CohereTokenizer, GemmaTokenizer, Qwen2Tokenizer

from helpers import text_checkpoints
from minisgl.errors import ConfigError
from minisgl_zoo.gguf.splits import SPLITS
from minisgl_zoo.gguf.tokenizer import tokenizer_files

TEXT = "I'M fooBar12345 = 1;\r\n/x 世界a"
PIECES = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 dbrx smaug-bpe chatglm-bpe glm4": (
        "I|'M| fooBar|123|45| =| |1|;\r\n|/x| 世界a"
    ),
    "qwen2 deepseek-r1-qwen qwen35 hunyuan": "I|'M| fooBar|1|2|3|4|5| =| |1|;\r\n|/x| 世界a",
    "deepseek-v3 hunyuan-dense": "I|'M| fooBar|123|45| =| |1|;\r\n|/x| |世界|a",
    "afmoe": "I|'M| fooBar|12|345| =| |1|;\r\n|/x| |世界|a",
    "deepseek-llm": "I|'|M| fooBar|1|2|3|4|5| =| |1|;|\r|\n|/|x| |世界|a",
    "deepseek-coder": "I|'|M| fooBar|1|2|3|4|5| = |1|;|\r|\n|/|x| |世界|a",
    "kimi-k2": "I'M| foo|Bar|123|45| =| |1|;\r\n|/x| |世界|a",
    "seed-coder": "I|'M| fooBar|1|2|3|4|5| =| |1|;|\r\n|/x| 世界a",
    "tekken": "I|'M| foo|Bar|1|2|3|4|5| =| |1|;\r\n/|x| 世界a",
    "gpt-4o minimax-m2": "I'M| foo|Bar|123|45| =| |1|;\r\n/|x| 世界a",
    "command-r refact starcoder smollm exaone": (
        "I|'|M| fooBar|1|2|3|4|5| =| |1|;|\r|\n|/|x| 世界a"
    ),
    "gpt-2 exaone4 olmo roberta-bpe": "I|'|M| fooBar|12345| =| 1|;|\r|\n|/|x| 世界a",
}
"""As llama.cpp splits: ids of a vocabulary that merges across words were equal."""
TEXTS = [*text_checkpoints.CORPUS[:5], TEXT, "e\u0301 नमस्ते", "a\r\n\r\n b\n\n\n  c   \n", "  x  "]


@pytest.mark.parametrize("names", PIECES)
def test_words(names: str) -> None:
    for name in names.split():
        words = SPLITS[name].pre_tokenizer().pre_tokenize_str(TEXT)
        assert "|".join(TEXT[start:stop] for _, (start, stop) in words) == PIECES[names]


def test_digits_of_trinity_are_in_groups_from_the_right() -> None:
    text = "a1b12c123d1234x1234567 123456"
    words = SPLITS["afmoe"].pre_tokenizer().pre_tokenize_str(text)
    pieces = "|".join(text[start:stop] for _, (start, stop) in words)
    assert pieces == "a|1|b|12|c|123|d|1|234|x|1|234|567| |123|456"


def test_letters_of_deepseek_llm_have_a_case() -> None:
    """Hebrew ones have none: such words stay together with the spaces between them."""
    text = "\u01c4 \u03ce\u0416 \u05d0 \u05d1"
    words = SPLITS["deepseek-llm"].pre_tokenizer().pre_tokenize_str(text)
    pieces = [text[start:stop] for _, (start, stop) in words]
    assert pieces == ["\u01c4", " \u03ce\u0416", " \u05d0 \u05d1"]


def test_each_name_is_tried() -> None:
    assert {name for names in PIECES for name in names.split()} == {*SPLITS}


def _values(tokenizer: Tokenizer, model: str, pre: str) -> dict[str, Any]:
    """The metadata of a GGUF file with the tokens and merges of this tokenizer."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    count = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(index) for index in range(count)]
    special = tokenizer.get_added_tokens_decoder()
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if index in special else 1 for index in range(count)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }


@pytest.mark.parametrize(
    ("pre", "kind"), [("command-r", CohereTokenizer), ("qwen2", Qwen2Tokenizer)]
)
def test_ids_are_those_of_transformers(pre: str, kind: Any) -> None:
    source = Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=source.pre_tokenizer.alphabet(), show_progress=False
    )
    source.train_from_iterator(TEXTS * 3, trainer)
    values = _values(source, "gpt2", pre)
    ours = Tokenizer.from_str(tokenizer_files(values, Path("x.gguf"))["tokenizer.json"])
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    theirs = kind(vocab=source.get_vocab(), merges=merges)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).ids == ids
        assert ours.decode(ids) == unicodedata.normalize("NFC", text)


def test_gemma4(tmp_path: Path) -> None:
    text_checkpoints.make(tmp_path, "gemma")
    source = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    values = _values(source, "gemma4", "gemma4")
    values["tokenizer.ggml.token_type"][0] = 2
    values["tokenizer.ggml.add_space_prefix"] = False
    ours = Tokenizer.from_str(tokenizer_files(values, Path("x.gguf"))["tokenizer.json"])
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    theirs = GemmaTokenizer(vocab=source.get_vocab(), merges=merges)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids) == text


def test_special_tokens_of_phi3_swallow_spaces(tmp_path: Path) -> None:
    text_checkpoints.make(tmp_path, "sentencepiece")
    values = _values(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), "llama", "default")
    values |= {"general.architecture": "phi3"}
    tokens = values["tokenizer.ggml.tokens"]
    values["tokenizer.ggml.scores"] = [0.0] * len(tokens)
    ours = Tokenizer.from_str(tokenizer_files(values, Path("x.gguf"))["tokenizer.json"])
    ids = ours.encode("<|im_start|> \nx<s> x", add_special_tokens=False).ids
    assert ids[0] == tokens.index("<|im_start|>")
    assert tokens[ids[1]] in ("▁", "▁x", "x")
    assert "\n" not in ours.decode(ids)
    assert ours.decode(ids).endswith(" x")


def test_an_unknown_name_is_refused() -> None:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [],
        "tokenizer.ggml.pre": "y",
    }
    with pytest.raises(ConfigError, match="pre is 'y', expected llama-bpe"):
        tokenizer_files(values, Path("x.gguf"))


@pytest.mark.parametrize("model", ["gpt2", "llama", "gemma4"])
def test_the_library_would_write_the_same_file(model: str, tmp_path: Path) -> None:
    """The vocabulary and the merges are written without it, and added tokens get the ids that they
    have in the vocabulary."""
    text_checkpoints.make(tmp_path, "gemma")
    values = _values(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), model, "gpt-2")
    tokens = values["tokenizer.ggml.tokens"]
    count = len(tokens)
    values["tokenizer.ggml.scores"] = [-float(index // 2) for index in range(count)]
    kinds = values["tokenizer.ggml.token_type"]
    kinds[count - 3 :], kinds[1] = [4, 3, 4], 2
    values |= {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.add_bos_token": True}
    text = tokenizer_files(values, Path("x.gguf"))["tokenizer.json"]
    written, again = json.loads(text), json.loads(Tokenizer.from_str(text).to_str())
    assert written == again
    if model == "llama":
        pairs = {
            (token[:end], token[end:])
            for token in tokens
            for end in range(1, len(token))
            if token[:end] in tokens and token[end:] in tokens
        }
        scores = dict(zip(tokens, values["tokenizer.ggml.scores"], strict=True))
        ids = {token: index for index, token in enumerate(tokens)}
        wanted = sorted(pairs, key=lambda pair: (-scores["".join(pair)], *map(ids.get, pair)))
        assert [tuple(merge) for merge in written["model"]["merges"]] == wanted
