"""Prompts become ids, and each bad prompt is refused."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

import pytest

from helpers.text_checkpoints import make
from minisgl.core import Failed, SamplingParams
from minisgl.message import (
    ChatPrompt,
    TextPrompt,
    TokenizeMsg,
    TokenPrompt,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.tokenizer import PromptEncoder, load_tokenizer
from minisgl.tokenizer.worker import Work

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
SAMPLING = SamplingParams(max_tokens=3, seed=7)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: Any) -> PromptEncoder:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make(folder, "byte_level", config={"chat_template": TEMPLATE})
    tokenizer = load_tokenizer(folder)
    return PromptEncoder(tokenizer=tokenizer, folder=folder)


def answered(encoder: PromptEncoder, message: TokenizeMsg) -> Any:
    work = Work(encoder)
    work.add(message)
    work.step()
    while not (answers := work.take()):  # a thread has it
        assert select.select([work.news], [], [], 60)[0]
    return answers[0]


def _ids(encoder: PromptEncoder, prompt: Any) -> list[int]:
    message = TokenizeMsg(uid=5, prompt=prompt, sampling=SAMPLING, priority=-2, namespace="n")
    answer = answered(encoder, message)
    assert isinstance(answer, UserMsg)
    assert (answer.uid, answer.sampling, answer.priority) == (5, SAMPLING, -2)
    assert answer.namespace == "n"
    return [int(token) for token in ids_from_bytes(answer.ids)]


def test_text_gets_the_tokenizers_bos(encoder: PromptEncoder) -> None:
    bos = encoder.tokenizer.bos_token_id
    ids = _ids(encoder, TextPrompt(text="Hello"))
    plain = encoder.tokenizer.encode("Hello", add_special_tokens=False)
    assert ids == [bos, *plain]
    assert _ids(encoder, TextPrompt(text="Hello", add_special_tokens=False)) == plain


def test_chat_gets_only_the_templates_bos(encoder: PromptEncoder) -> None:
    chat = ChatPrompt(messages=[{"role": "user", "content": "Hello"}])
    assert _ids(encoder, chat) == _ids(encoder, TextPrompt(text="Hello"))


def test_ids_pass_through(encoder: PromptEncoder) -> None:
    ids = [0, 7, 2**31 - 1]
    assert _ids(encoder, TokenPrompt(ids=ids_to_bytes(ids))) == ids


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (TokenPrompt(ids=b""), "empty"),
        (TextPrompt(text=""), "empty"),
        (TokenPrompt(ids=b"abc"), "int32"),
        (TokenPrompt(ids=ids_to_bytes([1, -1])), "negative, got -1"),
        (TextPrompt(text="a\ud800"), "lone surrogate at character 1"),
        (ChatPrompt(messages=[]), "at least one message"),
        (ChatPrompt(messages=[{"role": "user", "content": "\udc00"}]), "lone surrogate"),
        (ChatPrompt(messages=[{"role": "user", "content": [{}]}]), "text only"),
    ],
)
def test_bad_prompts(encoder: PromptEncoder, prompt: Any, match: str) -> None:
    answer = answered(encoder, TokenizeMsg(uid=9, prompt=prompt, sampling=SAMPLING))
    assert isinstance(answer, Failed)
    assert answer.uid == 9
    assert answer.status == 400
    assert match in answer.message


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_text_that_is_far_too_long_is_not_tokenized_whole(
    encoder: PromptEncoder, is_chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of 20 characters: 640 characters are the first power of 2 with more than 20."""
    seen: list[int] = []

    def encode(self: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
        seen.append(len(text))
        return [1] * (len(text) // 20)

    monkeypatch.setattr(type(encoder.tokenizer), "encode", encode)

    def tokenize(num_characters: int) -> UserMsg | Failed:
        text = "a" * num_characters
        prompt = (
            ChatPrompt(messages=[{"role": "user", "content": text}])
            if is_chat
            else TextPrompt(text=text)
        )
        seen.clear()
        message = TokenizeMsg(uid=1, prompt=prompt, sampling=SAMPLING, context_length=10)
        return answered(encoder, message)

    bos = len(encoder.tokenizer.special_tokens["bos_token"]) if is_chat else 0
    assert isinstance(tokenize(160 - bos), UserMsg)  # too long, which the scheduler refuses
    assert seen == [160]
    assert isinstance(tokenize(500), UserMsg)
    assert seen == [160, 320, 500 + bos]
    answer = tokenize(100_000 - bos)
    assert isinstance(answer, Failed)
    assert seen == [160, 320, 640]
    assert answer.code == "context_length_exceeded"
    assert "100,000 characters, of which the first 640 are 32 tokens" in answer.message
    assert "context length is 10 tokens; the prompt is too long" in answer.message


@pytest.mark.needs("minisgl_zoo")
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_tokens": 3}, slice(-20, None)),
        ({"max_tokens": 0, "pooling": "mean"}, slice(20)),
    ],
    ids=["last", "first"],
)
def test_of_a_text_that_is_cut_anyway_a_part_is_tokenized(
    encoder: PromptEncoder, options: Any, kept: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(map(str, range(5000)))
    whole = encoder.tokenizer.encode(text)
    encode, seen = type(encoder.tokenizer).encode, list[int]()

    def counted(self: Any, text: str, **rest: Any) -> list[int]:
        seen.append(len(text))
        return encode(self, text, **rest)

    monkeypatch.setattr(type(encoder.tokenizer), "encode", counted)
    sampling = SamplingParams(truncate_prompt_tokens=20, seed=1, **options)
    message = TokenizeMsg(uid=1, prompt=TextPrompt(text=text), sampling=sampling, context_length=50)
    answer = answered(encoder, message)
    assert isinstance(answer, UserMsg), answer
    assert ids_from_bytes(answer.ids).tolist() == whole[kept]
    assert seen == [800, 800]


def test_a_template_that_writes_nothing(tmp_path: Path) -> None:
    folder = make(tmp_path, "byte_level", config={"chat_template": "{{ messages[0].content }}"})
    tokenizer = load_tokenizer(folder)
    prompt = ChatPrompt(messages=[{"role": "assistant"}])
    encoder = PromptEncoder(tokenizer=tokenizer, folder=folder)
    answer = answered(encoder, TokenizeMsg(uid=1, prompt=prompt, sampling=SAMPLING))
    assert isinstance(answer, Failed)
    assert answer.status == 400
    assert "empty prompt" in answer.message


def test_a_bug_of_ours_fails_one_request(encoder: PromptEncoder, monkeypatch: Any) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(type(encoder.tokenizer), "encode", fail)
    message = TokenizeMsg(uid=1, prompt=TextPrompt(text="x"), sampling=SAMPLING)
    answer = answered(encoder, message)
    assert isinstance(answer, Failed)
    assert answer.status == 500
