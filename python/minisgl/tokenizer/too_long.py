"""Refuses a text that is far too long without tokenizing all of it."""

from __future__ import annotations

from minisgl.errors import PromptTooLong
from minisgl.tokenizer.tokenizer import Tokenizer

FAR_TOO_LONG = 16
"""If a text has more characters than this for each token of the context, its start is tokenized
first. Tokenizing 15 MiB at once would delay all other requests by seconds."""


def refuse_far_too_long(tokenizer: Tokenizer, text: str, context_length: int) -> None:
    """Raise PromptTooLong if the start of `text` has more than twice `context_length` tokens.

    Twice, because the end of a part may have more tokens than in the whole text. While tokens are
    long, for example runs of spaces, the part doubles.
    """
    num_characters = FAR_TOO_LONG * context_length
    while num_characters < len(text):
        num_tokens = len(tokenizer.encode(text[:num_characters], add_special_tokens=False))
        if num_tokens > 2 * context_length:
            raise PromptTooLong(
                f"the prompt is too long: the first {num_characters:,} of its {len(text):,} "
                f"characters are {num_tokens:,} tokens, and a request may have "
                f"{context_length:,} with its answer; shorten the prompt",
                limit=context_length,
                got=num_tokens,
                param="prompt",
            )
        num_characters *= 2
