"""A prompt to token ids: the request's first hop behind the API server."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from minisgl.core import Failed
from minisgl.errors import InvalidRequest
from minisgl.message import (
    ChatPrompt,
    FailedReply,
    TextPrompt,
    TokenizeMsg,
    TokenPrompt,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(self, prompt: TextPrompt | ChatPrompt | TokenPrompt) -> bytes:
        """The prompt's ids, at least one, as little-endian int32.

        Ids that the client chose are checked for their sign only: how many the model knows is the
        scheduler's to say. Raises InvalidRequest.
        """
        match prompt:
            case TextPrompt(text=text):
                ids = ids_to_bytes(self._encode_text(text, add_special_tokens=True))
                # Whether the tokenizer would add a special token must not decide what is empty.
                if not text or not ids:
                    raise InvalidRequest("the prompt is empty", param="prompt")
            case ChatPrompt(messages=messages, template_args=args):
                # A template writes the special tokens itself, the beginning of sequence included.
                text = self.template.render(messages, args)
                ids = ids_to_bytes(self._encode_text(text, add_special_tokens=False))
                if not ids:
                    raise InvalidRequest(
                        "the chat template makes an empty prompt of these messages",
                        param="messages",
                    )
            case TokenPrompt(ids=ids):
                _check_ids(ids)
        return ids

    def tokenize(self, message: TokenizeMsg) -> UserMsg | FailedReply:
        """The record for the scheduler, or for the client if anything is wrong."""
        try:
            ids = self.encode(message.prompt)
        except Exception as error:
            return failed_reply(Failed.of(message.uid, error))
        return UserMsg(
            uid=message.uid, ids=ids, sampling=message.sampling, priority=message.priority
        )

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is no valid Unicode: a lone surrogate at character {error.start}",
                param="prompt",
            ) from error
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def failed_reply(failed: Failed) -> FailedReply:
    """The same fields as a record for the API server."""
    return FailedReply(**msgspec.structs.asdict(failed))


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
