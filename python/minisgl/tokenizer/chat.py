"""Messages to ids. Only the template writes special tokens; text of a client never becomes one.

Otherwise a client could write "<|im_end|>" into a message, which would end it, and go on as another
role. The rendered text does not show which parts are the client's. So the messages are rendered
twice. The second time, each string of the client that could be a part of a special token has a mark
inside. A special token that is whole in both texts is the template's. If all of them are, the first
text is encoded with its special tokens. Otherwise the text between the template's tokens is encoded
without special tokens (`split_special_tokens` in transformers).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, Final

import tokenizers

from minisgl.errors import InvalidRequest
from minisgl.tokenizer.template import ChatTemplate, Part
from minisgl.tokenizer.tokenizer import Tokenizer

_PLAIN_ROLE: Final = re.compile(r"[\w-]+")
"""Roles that stay as they are: templates compare them, and write special tokens around them."""


class ChatEncoder:
    """Encodes messages with the template and the tokenizer of one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        decoder = tokenizer.backend.get_added_tokens_decoder()
        self._texts = {i: decoder[i].content for i in tokenizer.special_ids if decoder[i].content}
        self._specials = set(self._texts.values())
        self._joined = "\0".join(self._specials)  # one search; a chat may have 300,000 strings
        self._special = re.compile(_longest_of(self._specials))
        self._first = re.compile(_longest_of({text[0] for text in self._specials}))
        # No client can know the mark, and filters such as `trim`, `upper` and `tojson` keep it.
        self._mark = f"~{secrets.randbelow(10**20):020}~"
        # Stands for `image_text` in texts of messages for which no template writes images.
        self.image_mark = f"~{secrets.randbelow(10**20):020}~"
        self.image_text = ""  # what the template writes for an image
        self.image_around = ""  # what is added before and behind it

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        args: Mapping[str, Any] | None = None,
        check: Callable[[str], object] = lambda text: None,
    ) -> list[int]:
        """Return the ids of the prompt of `messages`, at least one. Raises InvalidRequest.

        args: see `ChatTemplate.render`. check: gets the text before it is encoded, and may raise.
        """
        given = self._template.variables(messages, args)
        text = self._fill(given)
        check(text)
        marked_given = {name: self._marked(value) for name, value in given.items()}
        for message, marked_message in zip(
            given["messages"], marked_given["messages"], strict=True
        ):
            if _PLAIN_ROLE.fullmatch(message["role"]):
                marked_message["role"] = message["role"]
        if marked_given != given:
            marked = self._fill(marked_given)
            if self._special.findall(text) != self._special.findall(marked):
                return self._encode_parts(marked)
        if ids := self._tokenizer.encode(text, add_special_tokens=False):
            return ids
        raise InvalidRequest(
            "the chat template makes an empty prompt of these messages", param="messages"
        )

    def _fill(self, given: Mapping[str, Any]) -> str:
        text, image = self._template.fill(given), self.image_text
        if not image:
            return text
        text = text.replace(self.image_mark, image)
        around = self.image_around
        return text.replace(image, f"{around}{image}{around}") if around else text

    def _marked(self, value: Any) -> Any:
        """Return the value with marks in each string that could be a part of a special token.

        They stand behind each character that begins a special token. A string that is itself a part
        of one has its mark behind its first character.
        """
        if isinstance(value, str):
            inner = value.strip()
            if inner and inner in self._joined:
                return value.replace(inner, inner[0] + self._mark + inner[1:], 1)
            return self._first.sub(self._with_mark, value)
        if isinstance(value, Part):  # templates compare its type
            text = value.get("text")
            return Part(value, text=self._marked(text)) if text else value
        if isinstance(value, dict):
            return {self._marked_key(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list) else value

    def _marked_key(self, key: Any) -> Any:
        """Mark a key, unless it is a name, which templates may look up."""
        return key if isinstance(key, str) and key.isidentifier() else self._marked(key)

    def _with_mark(self, found: re.Match[str]) -> str:
        return found[0] + self._mark

    def _encode_parts(self, marked: str) -> list[int]:
        """Return the ids of a marked text: special tokens that are whole, and text between them."""
        ids: list[int] = []
        end = 0
        for found in self._special.finditer(marked):
            ids += self._encode_plain(marked[end : found.start()])
            ids += self._tokenizer.encode(found[0], add_special_tokens=False)
            end = found.end()
        return ids + self._encode_plain(marked[end:])

    def _encode_plain(self, marked: str) -> list[int]:
        text = marked.replace(self._mark, "")
        ids = self._plain_ids(text)
        if not any(token in self._texts and self._texts[token] in text for token in ids):
            return ids
        # A Unigram model may have a special token among its pieces, so encode its two parts alone.
        return [token for piece in marked.split(self._mark) for token in self._plain_ids(piece)]

    def _plain_ids(self, text: str) -> list[int]:
        if not text:
            return []
        # As in `Tokenizer.encode`; `encode` of the library would hold Python's lock.
        [encoding] = self._plain.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that encodes special tokens as text. It is made when it is first
        needed, because that takes long."""
        content = json.loads(self._tokenizer.to_json())
        for token in content["added_tokens"]:
            token["special"] = token["content"] in self._specials
        plain = tokenizers.Tokenizer.from_str(json.dumps(content))
        plain.encode_special_tokens = True
        return plain


def _longest_of(texts: Collection[str]) -> str:
    """Return a regular expression for the longest of `texts`; without any, it matches nothing.

    Beginnings that texts have in common stand once. A pattern that tries 1,000 texts (Mistral's) in
    turn holds Python's lock for 20 s in a million "<".
    """
    if not texts:
        return "(?!)"
    pairs = zip(min(texts), max(texts), strict=False)  # their common beginning is that of all
    start = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    rests: dict[str, list[str]] = {}
    for text in texts:
        if rest := text[len(start) :]:
            rests.setdefault(rest[0], []).append(rest)
    if not rests:
        return re.escape(start)
    options = "|".join(_longest_of(rest) for _, rest in sorted(rests.items()))
    return f"{re.escape(start)}(?:{options}){'?' if start in texts else ''}"
