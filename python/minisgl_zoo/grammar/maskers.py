"""The masks of requests with a grammar. Each rank computes its own, from committed tokens alone.

A thread compiles the grammars beside the steps of other requests; API keys take turns. A request
waits until rank 0 has compiled its grammar (`CompiledMsg`). A slower rank waits before the first
mask until it has compiled the grammar, too. So plans do not depend on the time.

llguidance releases Python's lock while it compiles, but not while it reads a vocabulary. That stops
all threads of the process, for 1 s with 150,000 tokens. So a server reads the vocabulary while it
starts, and `LLM` when it gets its first grammar.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from minisgl.core import Failed
from minisgl.core.req import Mask, Masker
from minisgl.errors import InvalidSampling, RequestError
from minisgl.message import AbortMsg, CompiledMsg, UserMsg
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.text import shortened
from minisgl.utils.turns import TurnThreads
from minisgl_zoo.grammar.trial import LIMITS

_PREFIX_SPACE: Final = '"add_prefix_space":true'
OnCompiled = Callable[[RequestError | None], None]


class Grammars:
    """The maskers of one rank. Mutable: it keeps the vocabulary, and has a thread."""

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_ids: Collection[int],
        post: Callable[[CompiledMsg | AbortMsg], None] = lambda message: None,
    ) -> None:
        """tokenizer: called once, in the thread.

        vocab_size: of the model; the tokenizer may have fewer tokens or more. eos_ids: allowed
        where the answer may end. Where it must end, only they are allowed. post: called in the
        thread with a message for the scheduler. On rank 0 it sends the message to its inbox, so
        every rank gets it in the same turn; on other ranks it does nothing.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(id for id in eos_ids if id < vocab_size)
        self._post = post
        self._vocabulary: llguidance.LLTokenizer | str | None = None
        self._thread = thread = TurnThreads("grammar")
        weakref.finalize(self, thread.close, waits=False).atexit = False  # it may not be closed

    def prepare(self) -> Future[object]:
        """Read the vocabulary in the thread. The future is done after that, even if it failed."""
        return self._thread.submit(None, self._read_vocabulary)

    def create(self, message: UserMsg) -> Masker | None:
        """Return the masker of a request, and let the thread compile its grammar. None if it has
        none."""
        if not message.grammar:
            return None
        told = partial(self._tell, message.uid)
        return self.masker(message.grammar, told, message.share.key)

    def masker(
        self, grammar: str, on_compiled: OnCompiled = lambda error: None, key: int = 0
    ) -> GrammarMasker:
        """Return the masker of a grammar, and let the thread compile it.

        The thread then calls `on_compiled`, with an error if there can be no masks. key: the number
        of the request's API key.
        """
        compiled = partial(self._compiled, grammar, on_compiled)
        return GrammarMasker(self._thread.submit(key, compiled))

    def _tell(self, uid: int, error: RequestError | None) -> None:
        failed = Failed.of(uid, error) if error else None
        self._post(AbortMsg(uid=uid, because=failed) if failed else CompiledMsg(uid=uid))

    def close(self, *, waits: bool = True) -> None:
        """As `minisgl.runtime.scheduling.Grammars`."""
        self._thread.close(waits=waits)

    def _compiled(self, grammar: str, on_compiled: OnCompiled) -> _Matcher:
        error: RequestError | None = None
        try:
            vocabulary = self._read_vocabulary()
            if isinstance(vocabulary, str):
                raise InvalidSampling(vocabulary, param="structured_outputs")
            return _Matcher(vocabulary, grammar, self._vocab_size)
        except BaseException as raised:  # even a panic of the library must not end the engine
            error = raised if isinstance(raised, RequestError) else _failure(raised)
            raise error from raised
        finally:
            on_compiled(error)

    def _read_vocabulary(self) -> llguidance.LLTokenizer | str:
        """Return the vocabulary; a sentence if it cannot be read. An exception that is kept would
        keep the frames, and so the grammars, of all that raise it."""
        if self._vocabulary is None:
            # An answer continues a text, so no space is added before its first token.
            text = self._tokenizer().to_json().replace(_PREFIX_SPACE, _PREFIX_SPACE[:-4] + "false")
            size = self._vocab_size
            try:
                try:
                    self._vocabulary = llguidance.LLTokenizer(text, size, self._eos_ids)
                except ValueError:  # the tokenizer has tokens that the model does not know
                    self._vocabulary = llguidance.LLTokenizer(text, None, self._eos_ids)
            except Exception as error:
                self._vocabulary = (
                    f"llguidance cannot read this checkpoint's tokenizer ({_line(error)}), so no "
                    "answer can be made to follow a schema, regex, grammar or tool; ask for it in "
                    "the prompt"
                )
        return self._vocabulary


class _Matcher:
    """A compiled grammar with its first mask. Mutable: it matches the tokens that it is given."""

    def __init__(self, vocabulary: llguidance.LLTokenizer, grammar: str, vocab_size: int) -> None:
        """Raises InvalidSampling if the grammar takes more work than `LIMITS`."""
        self._matcher = llguidance.LLMatcher(vocabulary, grammar, limits=LIMITS, log_level=0)
        self._num_words = -(-vocabulary.vocab_size // 32), -(-vocab_size // 32)
        self._num_matched = 0
        self._first = self._next_mask(self._matcher)

    def mask(self, output: Sequence[int], drafts: Sequence[int] = ()) -> Mask:
        """As `Masker.mask`."""
        if drafts:
            self._match(output)
            matcher = self._matcher.deep_copy()  # an error in a draft ends nothing
            matcher.consume_tokens(list(drafts))
            return self._next_mask(matcher)
        if not output:
            return self._first
        self._match(output)
        return self._next_mask(self._matcher)

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """As `Masker.forced`."""
        self._match(output)
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    def _match(self, output: Sequence[int]) -> None:
        if len(output) > self._num_matched:
            self._matcher.consume_tokens(list(output[self._num_matched :]))
            self._num_matched = len(output)

    def _next_mask(self, matcher: llguidance.LLMatcher) -> Mask:
        filled, kept = self._num_words
        words = np.empty((1, filled), np.int32)
        fill_next_token_bitmask(matcher, words)
        if matcher.is_error():
            raise InvalidSampling(
                f"structured_outputs cannot be followed behind output token {self._num_matched}: "
                f"{_line(matcher.get_error())}; use a simpler schema, regex or grammar",
                param="structured_outputs",
            )
        return words[0, :kept].view(np.uint32)


class GrammarMasker:
    """A `minisgl.core.req.Masker`. Its first mask waits until the grammar is compiled."""

    def __init__(self, matcher: Future[_Matcher]) -> None:
        self._matcher = matcher

    def mask(self, output: Sequence[int], drafts: Sequence[int] = ()) -> Mask:
        """As `Masker`. Raises InvalidSampling if the grammar takes more work than `LIMITS`."""
        return self._matcher.result().mask(output, drafts)

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """As `Masker`."""
        return self._matcher.result().forced(output)


def _failure(error: BaseException) -> InvalidSampling:
    return InvalidSampling(
        f"structured_outputs cannot be compiled: {_line(error)}", param="structured_outputs"
    )


def _line(error: object) -> str:
    return shortened(str(error).partition("\n")[0], 300)
