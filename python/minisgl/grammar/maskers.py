"""The masks of requests with a grammar. Each rank has its own, from the committed tokens alone.

The first grammar of a process makes it read the tokenizer (1 s for 150,000 tokens). That and each
compilation run in a thread, beside the steps of other requests and the prompt's own step; the first
mask waits for them. Every rank waits, so plans do not depend on the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from minisgl.core.masker import Mask
from minisgl.errors import InvalidSampling, shortened
from minisgl.grammar.trial import LIMITS

_Matcher = tuple[llguidance.LLMatcher, int]
"""And the words of its masks."""


class Maskers:
    """Makes the maskers of one engine. Mutable: it keeps the vocabulary."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Collection[int]
    ) -> None:
        """tokenizer_json: returns the content of tokenizer.json, with all added tokens.

        vocab_size: of the model; the tokenizer may have fewer tokens or more. eos_ids: allowed
        where the grammar accepts, and the only tokens when it is complete.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = sorted(id for id in eos_ids if id < vocab_size)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()

    def create(self, grammar: str) -> GrammarMasker:
        """Return the masker of a new request; its grammar is compiled in the background."""
        matcher: Future[_Matcher] = Future()

        def compile() -> None:
            try:
                vocabulary = self._read_vocabulary()
                made = llguidance.LLMatcher(vocabulary, grammar, limits=LIMITS, log_level=0)
                matcher.set_result((made, -(-vocabulary.vocab_size // 32)))
            except Exception as error:
                matcher.set_exception(error)

        threading.Thread(target=compile, name="grammar", daemon=True).start()
        return GrammarMasker(matcher, self._vocab_size)

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                text, size = self._tokenizer_json(), self._vocab_size
                try:
                    self._vocabulary = llguidance.LLTokenizer(text, size, self._eos_ids)
                except ValueError:  # the tokenizer has tokens that the model does not know
                    self._vocabulary = llguidance.LLTokenizer(text, None, self._eos_ids)
            return self._vocabulary


class GrammarMasker:
    """A `minisgl.core.masker.Masker`. Mutable: it matches the tokens that it is given."""

    def __init__(self, matcher: Future[_Matcher], vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._num_matched = 0

    def mask(self, output: Sequence[int]) -> Mask:
        """As `Masker`. Raises InvalidSampling if the grammar takes more work than `LIMITS`."""
        matcher, num_words = self._matcher.result()
        matcher.consume_tokens(list(output[self._num_matched :]))
        self._num_matched = len(output)
        words = np.empty((1, num_words), np.int32)
        fill_next_token_bitmask(matcher, words)
        if matcher.is_error():
            reason = shortened(matcher.get_error().partition("\n")[0], 300)
            raise InvalidSampling(
                f"structured_outputs cannot be followed behind output token {len(output)}: "
                f"{reason}; use a simpler schema, regex or grammar",
                param="structured_outputs",
            )
        return words[0, : self._num_words].view(np.uint32)
