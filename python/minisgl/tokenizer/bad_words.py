"""`SamplingParams.bad_words` as token ids."""

from __future__ import annotations

import msgspec

from minisgl.core import SamplingParams
from minisgl.tokenizer.tokenizer import Tokenizer


def with_bad_words_ids(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Put the tokens of `bad_words` into `bad_words_ids`. Raises InvalidSampling.

    A word at the beginning of a line has other tokens than behind a space, so both count. The same
    text in yet other tokens is not found: a model rarely writes it so.
    """
    sequences = list(sampling.bad_words_ids)
    for word in sampling.bad_words:
        for text in (word, f" {word.lstrip(' ')}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and ids not in sequences:
                sequences.append(ids)
    return msgspec.structs.replace(sampling, bad_words=(), bad_words_ids=tuple(sequences))
