"""Streams give the same text as decoding all ids at once, as early as possible."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.text_checkpoints import CORPUS, KINDS, SAMPLES, STREAMED, make
from minisgl.builtin import model_path
from minisgl.tokenizer import Tokenizer, load_tokenizer

# Decoders that only the library's own stream knows.
UNKNOWN_DECODERS = {
    "wordpiece": tokenizers.decoders.WordPiece(),
    "bpe": tokenizers.decoders.BPEDecoder(),
    "byte level, then strip": tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteLevel(), tokenizers.decoders.Strip(" ", 1, 0)]
    ),
}


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: Any) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    loaded = {kind: load_tokenizer(make(root / kind, kind)) for kind in KINDS}
    words = tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>")
    loaded["words"] = Tokenizer(tokenizers.Tokenizer(words), {"eos_token": "</s>"})
    never = tokenizers.decoders.Metaspace(prepend_scheme="never")
    for name, decoder in {**UNKNOWN_DECODERS, "never": never}.items():
        folder = make(root / name, "metaspace" if name == "never" else "byte_level")
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.decoder = decoder
        backend.save(str(folder / "tokenizer.json"))
        loaded[name] = load_tokenizer(folder)
    return loaded


def _streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return [*map(stream.feed, ids), stream.flush()]


@pytest.mark.parametrize("kind", [*STREAMED, "words", "never", *UNKNOWN_DECODERS])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equals_decoding_all_at_once(kind: str, by_kind: dict[str, Tokenizer], data: Any) -> None:
    tokenizer = by_kind[kind]
    # A few ids beyond the vocabulary: the last layer of a model may be padded.
    ids = st.integers(0, tokenizer.vocab_size + 3)
    real = st.sampled_from(SAMPLES + CORPUS).map(tokenizer.encode)
    pieces = data.draw(st.lists(st.one_of(st.lists(ids, max_size=12), real), max_size=4))
    tokens = [token for piece in pieces for token in piece]
    skip = data.draw(st.booleans())
    expected = tokenizer.decode(tokens, skip_special_tokens=skip)
    assert "".join(_streamed(tokenizer, tokens, skip)) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=24), skip=st.booleans())
@pytest.mark.parametrize("kind", [STREAMED[0], STREAMED[2]])
def test_invalid_utf8(kind: str, by_kind: dict[str, Tokenizer], data: bytes, skip: bool) -> None:
    """Single-byte tokens in any order, among them every way in which UTF-8 can break."""
    tokenizer = by_kind[kind]
    ids = _byte_ids(tokenizer, kind)
    tokens = [ids[byte] for byte in data]
    assert "".join(_streamed(tokenizer, tokens, skip)) == tokenizer.decode(tokens)


def _byte_ids(tokenizer: Tokenizer, kind: str) -> list[int]:
    """The token of each byte; bytes that UTF-8 never uses are taken from what is left over."""
    if kind == "sentencepiece":
        return [_id(tokenizer, f"<0x{byte:02X}>") for byte in range(256)]
    writer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_byte: dict[int, str] = {}
    for char in map(chr, [*range(0x800), 0x800, *range(0x1000, 0xD800, 0x400), 0xE000, 0xFFFF]):
        by_byte |= dict(zip(char.encode(), writer.pre_tokenize_str(char)[0][0], strict=True))
    for char in map(chr, range(0x10000, 0x110000, 0x8000)):
        by_byte |= dict(zip(char.encode(), writer.pre_tokenize_str(char)[0][0], strict=True))
    unused = sorted(set(writer.alphabet()) - set(by_byte.values()))
    return [_id(tokenizer, by_byte.get(byte) or unused.pop()) for byte in range(256)]


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None, token
    return int(token_id)


def test_byte_level_text_comes_with_the_token_that_completes_it(
    by_kind: dict[str, Tokenizer],
) -> None:
    tokenizer = by_kind["byte_level"]
    ids = [_id(tokenizer, token) for token in ("ð", "Ł", "¦", "ľ", "a")]  # 🦜a
    assert _streamed(tokenizer, ids, True) == ["", "", "", "🦜", "a", ""]


@pytest.mark.parametrize("kind", STREAMED)
@pytest.mark.parametrize("text", [" a", "  a", "    ", "a  b"])
def test_spaces_at_the_start(text: str, kind: str, by_kind: dict[str, Tokenizer]) -> None:
    """Decoders drop at most one."""
    tokenizer = by_kind[kind]
    space = tokenizer.encode("a b", add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for tokens in (ids, [*ids, *space], [ids[0], *ids]):
        assert "".join(_streamed(tokenizer, tokens, True)) == tokenizer.decode(tokens)


@pytest.mark.needs("minisgl_zoo")
def test_runs_of_bytes_come_when_they_end(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["sentencepiece"]
    ids = tokenizer.encode("🦜", add_special_tokens=False)
    ids = ids[-4:] + tokenizer.encode("a", add_special_tokens=False)[-1:]
    pieces = _streamed(tokenizer, ids, True)
    assert pieces[:4] == [""] * 4
    assert pieces[4].startswith("🦜")


@pytest.mark.parametrize("kind", STREAMED)
def test_what_is_held_comes_before_the_token(kind: str, by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind[kind]
    bird = tokenizer.encode("a🦜", add_special_tokens=False)
    (*_, b) = tokenizer.encode("a b", add_special_tokens=False)
    for ids in (bird, bird[:-1], bird + bird[-1:], bird + bird[1:]):
        stream = tokenizer.stream(skip_special_tokens=True)
        before = "".join(map(stream.feed, ids))
        held, last = stream.held(b), stream.feed(b)
        assert last[held:] == stream.data(b).decode(), before
        assert held == len(tokenizer.decode(ids)) - len(before)


def test_a_repeated_invalid_byte_takes_no_longer_than_a_letter(
    by_kind: dict[str, Tokenizer],
) -> None:
    """The window method decodes all that is held, over and over: quadratic here."""
    tokenizer = by_kind["byte_level"]
    ids = [_id(tokenizer, "ł")] * 100_000  # a continuation byte, 0x82
    text = "".join(_streamed(tokenizer, ids, True))
    assert text == "\ufffd" * len(ids)


def test_the_librarys_stream_gives_text_as_it_comes(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["byte level, then strip"]
    ids = tokenizer.encode("Hello, 🦜!", add_special_tokens=False)
    pieces = _streamed(tokenizer, ids, True)
    assert "".join(pieces) == "Hello, 🦜!"
    assert pieces[0]
    assert pieces[-1] == ""
    broken = _streamed(tokenizer, ids[:-2], True)  # the bird's last byte is missing
    assert broken[-1].endswith("\ufffd")
    assert "".join(broken) == tokenizer.decode(ids[:-2])


def test_a_panic_of_the_library_is_an_exception(tmp_path: Any) -> None:
    """Strip at both ends panics on a text of one space (tokenizers 0.23)."""
    folder = make(tmp_path, "byte_level")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    strip = tokenizers.decoders.Strip(" ", 1, 1)
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel(), strip])
    tokenizer = Tokenizer(backend, {})
    with pytest.raises(RuntimeError, match="tokenizers library failed"):
        _streamed(tokenizer, tokenizer.encode(" ", add_special_tokens=False), True)


def test_two_streams_are_independent(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["sentencepiece"]
    ids = tokenizer.encode(CORPUS[0], add_special_tokens=False)
    one, two = tokenizer.stream(), tokenizer.stream(skip_special_tokens=False)
    pairs = [(one.feed(token), two.feed(token)) for token in ids]
    assert "".join(a for a, _ in pairs) == "".join(b for _, b in pairs) == CORPUS[0]


def test_skipping_special_tokens(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["byte_level"]
    ids = tokenizer.encode("a<|im_end|>b<tool>c", add_special_tokens=True)
    assert "".join(_streamed(tokenizer, ids, True)) == "ab<tool>c"
    assert "".join(_streamed(tokenizer, ids, False)) == "<s>a<|im_end|>b<tool>c"


def test_builtin_tokenizer() -> None:
    tokenizer = load_tokenizer(model_path())
    for text in SAMPLES[:5]:
        ids = tokenizer.encode(text)
        assert "".join(_streamed(tokenizer, ids, False)) == tokenizer.decode(
            ids, skip_special_tokens=False
        )
