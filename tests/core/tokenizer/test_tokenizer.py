"""The same ids and the same text as transformers, without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from helpers.text_checkpoints import CORPUS, KINDS, SAMPLES, make
from minisgl.errors import CheckpointError, ConfigError
from minisgl.tokenizer import load_tokenizer, warn_of_unknown_ids


def _reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def _assert_same(folder: Path, samples: list[str]) -> None:
    ours, theirs = load_tokenizer(folder), _reference(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    assert set(theirs.all_special_ids) <= ours.special_ids
    for text in samples:
        for add in (False, True):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add), text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


def test_a_model_with_a_smaller_vocabulary_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(tmp_path, "byte_level")
    tokenizer = load_tokenizer(folder)
    for vocab_size in (tokenizer.vocab_size, tokenizer.vocab_size - 1):
        assert not caplog.text
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
        warn_of_unknown_ids(tokenizer, folder)
    assert f"has {vocab_size + 1:,} tokens, but by config.json the model has only" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_transformers(kind: str, tmp_path: Path) -> None:
    _assert_same(make(tmp_path, kind), SAMPLES + CORPUS)


@pytest.mark.parametrize(
    "config",
    [
        {"pad_token": "[PAD]", "eos_token": "<|im_end|>"},
        {"additional_special_tokens": ["<|im_start|>", "<extra>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}},
        {"eos_token": "</tool>"},  # tokenizer.json has it as a plain added token
        {
            "added_tokens_decoder": {
                "99999": {"content": "<new>", "special": False, "normalized": False},
                "99998": {"content": "<new special>", "special": True},
            }
        },
    ],
    ids=lambda config: next(iter(config)),
)
def test_tokens_named_in_the_configuration(config: dict[str, Any], tmp_path: Path) -> None:
    folder = make(tmp_path, "byte_level", config=config)
    text = "a[PAD]b<extra>c<image>d<new>e<new special>f<tool>g</tool>h<|im_end|></s>"
    _assert_same(folder, [text])


def test_old_special_tokens_map(tmp_path: Path) -> None:
    folder = make(tmp_path, "byte_level")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "pad_token": "<pad>"})
    )
    _assert_same(folder, ["x</s>y<pad>"])


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    folder = make(tmp_path, "byte_level")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_id=0, pad_token="<unk>")
    backend.save(str(folder / "tokenizer.json"))
    _assert_same(folder, [CORPUS[0], "a"])


@pytest.mark.needs("minisgl_zoo")
def test_sentencepiece_model_is_converted(tmp_path: Path) -> None:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    _assert_same(tmp_path, ["Hello world", " The quick fox\n", "unseen Ωμέγα 🦜", "x</s>"])
    ours = load_tokenizer(tmp_path)
    stream = ours.stream()
    ids = ours.encode("Hello 🦜 world\n")
    assert "".join(map(stream.feed, ids)) + stream.flush() == "Hello 🦜 world\n"


class TestErrors:
    @pytest.mark.needs("minisgl_zoo")
    def test_no_tokenizer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)  # is not even asked
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        with pytest.raises(CheckpointError, match="has no tokenizer: neither"):
            load_tokenizer(tmp_path)

    @pytest.mark.needs("minisgl_zoo")
    def test_only_the_tokenizer_of_mistral(self, tmp_path: Path) -> None:
        (tmp_path / "tekken.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"only Mistral's tekken\.json, .* take a copy"):
            load_tokenizer(tmp_path)

    def test_an_incomplete_tokenizer_is_refused(self, tmp_path: Path) -> None:
        # transformers makes an empty tokenizer of the model's kind then, which encodes nothing.
        (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
        (tmp_path / "vocab.json").write_text("{}")
        with pytest.raises(CheckpointError, match="has no tokenizer"):
            load_tokenizer(tmp_path)

    @pytest.mark.needs("minisgl_zoo")
    def test_a_model_that_cannot_be_converted(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        (tmp_path / "tokenizer.model").write_bytes(b"broken")
        with pytest.raises(CheckpointError, match="cannot make one of what is there") as raised:
            load_tokenizer(tmp_path)
        assert "\n" not in str(raised.value)

    def test_broken_files(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"does not load .*; download it again"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
        with pytest.raises(CheckpointError, match=r"does not load .*: run `git lfs pull` there"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        with pytest.raises(CheckpointError, match="must hold a JSON object"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(CheckpointError, match="is not valid JSON"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        "config",
        [
            {"eos_token": {"text": "</s>"}},
            {"eos_token": "\ud800"},
            {"added_tokens_decoder": {"x": "</s>"}},
            {"added_tokens_decoder": [1]},
        ],
    )
    def test_special_tokens_in_no_known_form(self, config: dict[str, Any], tmp_path: Path) -> None:
        folder = make(tmp_path, "byte_level", config=config)
        with pytest.raises(CheckpointError, match="special tokens"):
            load_tokenizer(folder)

    @pytest.mark.needs("minisgl_zoo")
    def test_missing_transformers(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        (tmp_path / "tokenizer.model").touch()
        with pytest.raises(ConfigError, match=r"pip install 'minisgl\[sentencepiece\]'"):
            load_tokenizer(tmp_path)


def test_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = make(tmp_path, "byte_level")
    script = (
        "import sys; from pathlib import Path; from minisgl.tokenizer import *\n"
        f"folder = Path({str(folder)!r})\n"
        "PromptEncoder(tokenizer=load_tokenizer(folder), folder=folder).template\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
