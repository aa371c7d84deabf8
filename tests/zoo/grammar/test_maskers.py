"""Grammars compiled in a thread: the reports, failures, and kinds of tokenizers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from helpers.text_checkpoints import make
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.errors import InvalidSampling
from minisgl.message import AbortMsg, CompiledMsg, UserMsg
from minisgl.tokenizer import Tokenizer, load_tokenizer
from minisgl_zoo.grammar.maskers import Grammars

GRAMMAR = 'start: "hello"'


def first_texts(tokenizer: Tokenizer, maskers: Grammars) -> list[str]:
    mask = maskers.masker(GRAMMAR).mask([])
    ids = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return [tokenizer.decode([id]) for id in ids]


@pytest.mark.parametrize("prefix_space", ["false", "true"])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
def test_an_answer_begins_without_an_added_space(
    kind: str, prefix_space: str, tmp_path: Path
) -> None:
    """Some tokenizers put a space before a text."""
    folder = make(tmp_path, kind)
    file = folder / "tokenizer.json"
    text = file.read_text()
    file.write_text(
        text.replace('"add_prefix_space": false', f'"add_prefix_space": {prefix_space}')
    )
    tokenizer = load_tokenizer(folder)
    maskers = Grammars(lambda: tokenizer, tokenizer.vocab_size, {2})
    texts = first_texts(tokenizer, maskers)
    assert texts
    assert all("hello".startswith(each) for each in texts), texts


def messages(tokenizer: Tokenizer, grammars: list[str]) -> list[CompiledMsg | AbortMsg]:
    """What is posted for these grammars, in order."""
    posted: list[CompiledMsg | AbortMsg] = []
    all_posted = threading.Event()

    def post(message: CompiledMsg | AbortMsg) -> None:
        posted.append(message)
        if len(posted) == len(grammars):
            all_posted.set()

    made = Grammars(lambda: tokenizer, tokenizer.vocab_size, {2}, post)
    vocabulary = made.prepare()
    for uid, grammar in enumerate(grammars):
        message = UserMsg(uid=uid, ids=b"", sampling=SamplingParams(), grammar=grammar)
        masker = made.create(message)
        assert masker
    assert all_posted.wait(60)
    assert vocabulary.done()
    made.close()
    return posted


def test_a_message_says_that_a_grammar_is_compiled_or_why_not() -> None:
    compiled, failed, other = messages(
        load_tokenizer(model_path()), [GRAMMAR, "start: nowhere", GRAMMAR]
    )
    assert (compiled, other) == (CompiledMsg(uid=0), CompiledMsg(uid=2))
    assert isinstance(failed, AbortMsg)
    assert failed.because
    assert failed.because.status == 400
    assert "nowhere" in failed.because.message


def test_the_thread_ends_when_nobody_holds_the_grammars() -> None:
    made = Grammars(lambda: load_tokenizer(model_path()), 1408, {2})
    made.masker(GRAMMAR).mask([])
    [thread] = made._thread._threads
    del made
    thread.join(10)
    assert not thread.is_alive()


def test_with_an_unreadable_tokenizer_only_grammars_fail(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make(tmp_path, "metaspace"))
    for message in messages(tokenizer, [GRAMMAR, GRAMMAR]):
        assert isinstance(message, AbortMsg)
        assert message.because
        assert message.because.status == 400
        assert "cannot read this checkpoint's tokenizer" in message.because.message
    made = Grammars(lambda: tokenizer, tokenizer.vocab_size, {2})
    depths = []
    for _ in range(3):
        with pytest.raises(
            InvalidSampling, match="cannot read this checkpoint's tokenizer"
        ) as refused:
            made.masker(GRAMMAR).mask([])
        depths.append(len(refused.traceback))
    assert depths[0] == depths[2], "a refusal keeps nothing of those before it"
