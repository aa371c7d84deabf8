"""A prompt to token ids: the request's first hop behind the API server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.core import Failed
from minisgl.errors import InvalidRequest, PromptTooLong
from minisgl.message import (
    ChatPrompt,
    TextPrompt,
    TokenizeMsg,
    TokenPrompt,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tokenizer.tokenizer import Tokenizer

FAR_TOO_LONG = 16
"""Characters for each token that a request may have, from which on a text's beginning is tokenized
before the whole: 15 MiB would hold up all others for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(
        self, prompt: TextPrompt | ChatPrompt | TokenPrompt, context_length: int | None = None
    ) -> bytes:
        """The prompt's ids, at least one, as little-endian int32.

        Ids that the client chose are checked for their sign only: how many the model knows, and how
        many a prompt may have, is the scheduler's to say. Raises InvalidRequest, and PromptTooLong
        where a text's beginning has twice `context_length` already.
        """
        match prompt:
            case TextPrompt(text=text):
                self._check_text(text, context_length)
                ids = ids_to_bytes(self.tokenizer.encode(text, add_special_tokens=True))
                # Whether the tokenizer would add a special token must not decide what is empty.
                if not text or not ids:
                    raise InvalidRequest("the prompt is empty", param="prompt")
            case ChatPrompt(messages=messages, template_args=args):
                # A template writes the special tokens itself, the beginning of sequence included.
                text = self.template.render(messages, args)
                self._check_text(text, context_length)
                ids = ids_to_bytes(self.tokenizer.encode(text, add_special_tokens=False))
                if not ids:
                    raise InvalidRequest(
                        "the chat template makes an empty prompt of these messages",
                        param="messages",
                    )
            case TokenPrompt(ids=ids):
                _check_ids(ids)
        return ids

    def tokenize(self, message: TokenizeMsg) -> UserMsg | Failed:
        """The record for the scheduler, or for the client if anything is wrong."""
        try:
            ids = self.encode(message.prompt, message.context_length)
        except Exception as error:
            return Failed.of(message.uid, error)
        return UserMsg(
            uid=message.uid,
            ids=ids,
            sampling=message.sampling,
            priority=message.priority,
            namespace=message.namespace,
        )

    def _check_text(self, text: str, context_length: int | None) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is no valid Unicode: a lone surrogate at character {error.start}",
                param="prompt",
            ) from error
        if context_length is not None:
            self._refuse_far_too_long(text, context_length)

    def _refuse_far_too_long(self, text: str, context_length: int) -> None:
        """Twice too long, as the cut may part what would have been fewer tokens. Where tokens are
        long, those of runs of spaces for instance, more and more of the text is looked at."""
        num_characters = FAR_TOO_LONG * context_length
        while num_characters < len(text):
            beginning = text[:num_characters]
            num_tokens = len(self.tokenizer.encode(beginning, add_special_tokens=False))
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


def _check_ids(data: bytes) -> None:
    try:
        ids = ids_from_bytes(data)
    except ValueError as error:
        raise InvalidRequest(
            f"the token ids are no int32 values: {error}", param="prompt"
        ) from error
    if not len(ids):
        raise InvalidRequest("the prompt is empty", param="prompt")
    if (lowest := int(np.min(ids))) < 0:
        raise InvalidRequest(f"token ids must not be negative, got {lowest}", param="prompt")
