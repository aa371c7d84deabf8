"""Encodes a prompt as token ids: the first hop of a request after the API server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np

from minisgl import plugins
from minisgl.core import SamplingParams
from minisgl.core.adapters import Adapter
from minisgl.core.image import NO_MEDIA, Image, Media
from minisgl.errors import CONTEXT_IS, InvalidRequest, InvalidSampling, PromptTooLong
from minisgl.message import (
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.tokenizer.chat import ChatEncoder
from minisgl.tokenizer.template import ChatTemplate, find_sources
from minisgl.tokenizer.tokenizer import Tokenizer

FAR_TOO_LONG: Final = 16
"""If a text has more characters than this for each token of the context, its start is tokenized
first. Tokenizing 15 MiB at once would delay all other requests by seconds."""


class AnswerPlan(Protocol):
    """How the answer to a prompt is parsed, and what a grammar must enforce in it."""

    def resolve(self, sampling: SamplingParams, tokenizer: Tokenizer) -> tuple[str, str]:
        """Return the answer's grammar and the JSON of its form; each is "" if there is none.

        Raises InvalidSampling for a grammar that cannot be compiled.
        """


class Images(Protocol):
    """The images of a prompt (`minisgl_zoo.vision.prompt`)."""

    def placed(self, encoded: Encoded) -> Encoded:
        """Return the prompt with the ids of its images. Raises InvalidRequest."""


class ImageReader(Protocol):
    """Reads the images of chats (the row `reader` of the table `vision`)."""

    def load(self) -> None:
        """Start now, so that the first image need not wait."""

    def read(
        self, messages: Sequence[Mapping[str, Any]], most_tokens: int | None
    ) -> tuple[list[dict[str, Any]], Images]:
        """Return the messages with a `Part` for each image, and the images. Raises
        InvalidRequest, PromptTooLong."""

    def moved(self, ids: bytes, images: Sequence[Image]) -> tuple[Image, ...]:
        """Return the images of a prompt at their places in other ids, as `Encoded` has them. Raises
        InvalidRequest."""

    def keyed(self, ids: bytes, images: Sequence[Image]) -> bytes:
        """Return the ids of a prompt as `UserMsg` has them (`minisgl.core.image`)."""

    def namespace_of(self, namespace: str, images: Sequence[Image]) -> str:
        """Return the namespace of a prompt with images."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded prompt. ids: little-endian int32, without the ids that stand for images. plan:
    None for an answer in text. prediction: ids that the answer may repeat. uncut: the first tokens,
    which `truncate_prompt_tokens` must keep, with one more: those before a pair's second text."""

    ids: bytes
    plan: AnswerPlan | None = None
    prediction: bytes = b""
    images: tuple[Image, ...] = ()
    uncut: int = 0


Kept = Literal["all", "first", "last"]

EncodeChat = Callable[["PromptEncoder", ChatPrompt, Callable[[str], object]], Encoded]
"""The row `chat` of the table `answers`: encodes a chat whose answer may have parts. The last
argument gets the prompt's text before it is encoded, and may raise. Raises InvalidRequest."""

Compile = Callable[[dict[str, Any]], str]
"""The row `compile` of the table `grammars`: returns the grammar of a checked `structured_outputs`.
Raises InvalidSampling."""

IdsOfWords = Callable[[SamplingParams, Tokenizer], tuple[tuple[int, ...], ...]]
"""The row `words` of the table `logit_options`: the tokens of `bad_words` and `bad_words_ids`."""


@dataclass(frozen=True, kw_only=True)  # no slots: what is cached is kept in __dict__
class PromptEncoder:
    """Encodes prompts with the tokenizer and chat template of the checkpoint in `folder`.

    tool_call_parser: the format of tool calls; None for the format of the chat template. media:
    where images may come from.
    """

    tokenizer: Tokenizer
    folder: Path
    tool_call_parser: str | None = None
    media: Media = NO_MEDIA

    @cached_property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat template, loaded when it is first used."""
        return ChatTemplate(find_sources(self.folder), self.tokenizer.special_tokens)

    @cached_property
    def chat(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer, self.template)

    @cached_property
    def images(self) -> ImageReader | None:
        """What reads images; None if this model reads text only."""
        create: Callable[[PromptEncoder], ImageReader | None] | None
        create = plugins.find("vision", "reader")
        return create(self) if create else None

    @cached_property
    def _encode_chat(self) -> EncodeChat:
        found: EncodeChat | None = plugins.find("answers", "chat")
        return found or _encode_plain_chat

    def encode(
        self,
        prompt: TextPrompt | ChatPrompt | TokenPrompt,
        context_length: int | None = None,
        kept: Kept = "all",
    ) -> Encoded:
        """Return the prompt, with at least one id.

        If the client sends ids, only their sign is checked. The scheduler checks them against the
        vocabulary, and the prompt's length. kept: which tokens `truncate_prompt_tokens` keeps.
        Raises InvalidRequest, and PromptTooLong if a part of the text has more than twice
        `context_length` tokens; of a text that is cut anyway, that part is encoded instead.
        """
        match prompt:
            case TextPrompt(text=text, pair=str(pair)):
                self._part(text, context_length)
                return _encoded_pair(self.tokenizer, text, self._part(pair, context_length, kept))
            case TextPrompt(text=text, add_special_tokens=adds):
                text = self._part(text, context_length, kept)
                ids = ids_to_bytes(self.tokenizer.encode(text, add_special_tokens=adds))
                # An empty text is refused even if the tokenizer would add a special token.
                if not text or not ids:
                    raise InvalidRequest("the prompt is empty", param="prompt")
            case ChatPrompt(messages=messages):
                images: Images | None = None
                if has_images(messages) and self.images:
                    messages, images = self.images.read(messages, context_length)
                    prompt = msgspec.structs.replace(prompt, messages=messages)
                encoded = self._chat_ids(prompt, context_length)
                return images.placed(encoded) if images else encoded
            case TokenPrompt(ids=ids):
                _check_ids(ids)
        return Encoded(ids)

    def _chat_ids(self, prompt: ChatPrompt, context_length: int | None) -> Encoded:
        """Return a chat whose messages have no images, or `Part`s for them."""
        # The template writes all special tokens, the BOS token included.
        check = partial(self._part, context_length=context_length)
        prediction = self._prediction(prompt.prediction, context_length)
        if prompt.is_split:
            return replace(self._encode_chat(self, prompt, check), prediction=prediction)
        ids = ids_to_bytes(self.chat.encode(prompt.messages, prompt.template_args, check))
        return Encoded(ids, prediction=prediction)

    def accepted(self, prompt: Encoded, ids: bytes) -> Encoded:
        """Return a prompt with the ids of an earlier engine's `Accepted`, since a template may
        write another day now. Raises InvalidRequest if its images are other ones."""
        images = prompt.images
        if images:
            assert self.images
            images = self.images.moved(ids, images)
        return replace(prompt, ids=ids, images=images)

    def request(
        self,
        prompt: Encoded,
        sampling: SamplingParams,
        namespace: str,
        uid: int = 0,
        priority: int = 0,
        adapter: Adapter | None = None,
    ) -> UserMsg:
        """Return the record for the scheduler. Raises InvalidSampling for a grammar that cannot be
        compiled."""
        grammar = form = ""
        if sampling.bad_words:
            find_ids: IdsOfWords = plugins.need("logit_options", "words", "bad_words")
            found = find_ids(sampling, self.tokenizer)
            sampling = msgspec.structs.replace(sampling, bad_words=(), bad_words_ids=found)
        if prompt.plan:
            grammar, form = prompt.plan.resolve(sampling, self.tokenizer)
        elif sampling.structured_outputs:
            compiled: Compile = plugins.need("grammars", "compile", "structured_outputs")
            grammar = compiled(sampling.structured_outputs)
        if sampling.structured_outputs is not None:
            sampling = msgspec.structs.replace(sampling, structured_outputs=None)
        ids = prompt.ids
        if prompt.images:
            assert self.images
            if sampling.truncate_prompt_tokens is not None:
                raise InvalidSampling(
                    "truncate_prompt_tokens would cut images; leave it out",
                    param="truncate_prompt_tokens",
                )
            ids = self.images.keyed(ids, prompt.images)
            namespace = self.images.namespace_of(namespace, prompt.images)
        return UserMsg(
            uid=uid,
            ids=bytes(self._kept(sampling, ids, prompt.uncut)),
            sampling=sampling,
            priority=priority,
            namespace=namespace,
            adapter=adapter,
            grammar=grammar,
            form=form,
            prediction=prompt.prediction,
            images=prompt.images,
        )

    def _kept(self, sampling: SamplingParams, ids: bytes, uncut: int) -> bytes:
        most = sampling.truncate_prompt_tokens
        if not sampling.pooling or most is None or len(ids) <= 4 * most:
            return sampling.kept(ids)
        last = int(ids_from_bytes(ids)[-1])
        end = ids[-4:] if last in self.tokenizer.special_ids else b""
        if uncut and most <= (others := uncut + bool(end)):
            raise InvalidRequest(
                f"{others} tokens are not the document's, so a cut to {most} leaves none of it; "
                "shorten the query, or raise truncate_prompt_tokens",
                param="truncate_prompt_tokens",
            )
        return ids[: 4 * most - len(end)] + end

    def _prediction(self, text: str, context_length: int | None) -> bytes:
        """Return the ids of a predicted answer. Raises InvalidRequest if the text is too long."""
        if not text:
            return b""
        if context_length is not None and len(text) > (most := FAR_TOO_LONG * context_length):
            raise InvalidRequest(
                f"prediction has {len(text):,} characters, and may have {most:,}: {FAR_TOO_LONG} "
                "for each token of the context; send the part that the answer may repeat",
                param="prediction",
            )
        self._part(text, None)
        return ids_to_bytes(self.tokenizer.encode(text, add_special_tokens=False))

    def _part(self, text: str, context_length: int | None, kept: Kept = "all") -> str:
        """Return the text, or the part that is encoded instead (`encode`).

        The part doubles while its tokens are long, for example runs of spaces. Twice the context,
        because its end may have more tokens than in the whole text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is no valid Unicode: a lone surrogate at character {error.start}",
                param="prompt",
            ) from error
        if context_length is None:
            return text
        num_characters = FAR_TOO_LONG * context_length
        while num_characters < len(text):
            part = text[-num_characters:] if kept == "last" else text[:num_characters]
            num_tokens = len(self.tokenizer.encode(part, add_special_tokens=False))
            if num_tokens > 2 * context_length:
                if kept != "all":
                    return part
                raise PromptTooLong(
                    f"the prompt has {len(text):,} characters, of which the first "
                    f"{num_characters:,} are {num_tokens:,} tokens, but {CONTEXT_IS} "
                    f"{context_length} tokens; the prompt is too long, so shorten it",
                    limit=context_length,
                    got=num_tokens,
                    param="prompt",
                )
            num_characters *= 2
        return text


def _encoded_pair(tokenizer: Tokenizer, first: str, second: str) -> Encoded:
    """Return two texts as the tokenizer's template joins them. Raises InvalidRequest if the first
    one has the text of the special token by which an encoder finds the second one."""
    [encoding] = tokenizer.backend.encode_batch_fast([(first, second)])
    ids, types = encoding.ids, encoding.type_ids
    if 1 in types and ids.index(ids[-1]) + 1 != types.index(1):
        raise InvalidRequest(
            f"the first text of a pair must not have {tokenizer.backend.id_to_token(ids[-1])}, "
            "which ends it; leave it out",
            param="query",
        )
    of_second = [index for index, text in enumerate(encoding.sequence_ids) if text == 1]
    return Encoded(ids_to_bytes(ids), uncut=of_second[0] if of_second else len(ids))


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message has an image, as chat completions write it."""
    contents = (message.get("content") for message in messages)
    return any(
        isinstance(part, Mapping) and part.get("type") == "image_url"
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _encode_plain_chat(
    encoder: PromptEncoder, prompt: ChatPrompt, check: Callable[[str], object]
) -> Encoded:
    """Return the ids of a chat whose answer is text. Raises InvalidRequest for an option that only
    a package with `answers` reads."""
    asked = {
        "tools": prompt.tools or prompt.tool_choice != "auto",
        "messages": any(message.get("tool_calls") for message in prompt.messages),
        "thinking_budget": prompt.thinking_budget is not None,
        "reasoning_effort": "reasoning_effort" in prompt.template_args,
    }
    for name, is_asked in asked.items():
        if is_asked:
            what = "a tool call in messages" if name == "messages" else name
            raise InvalidRequest(f"{what} {plugins.absent('answers')}; leave it out", param=name)
    return Encoded(ids_to_bytes(encoder.chat.encode(prompt.messages, prompt.template_args, check)))


def _check_ids(data: bytes) -> None:
    try:
        ids = ids_from_bytes(data)
    except ValueError as error:
        raise InvalidRequest(f"the token ids are no int32: {error}", param="prompt") from error
    if not len(ids):
        raise InvalidRequest("the prompt is empty", param="prompt")
    if (lowest := int(np.min(ids))) < 0:
        raise InvalidRequest(f"token ids must not be negative, got {lowest}", param="prompt")
