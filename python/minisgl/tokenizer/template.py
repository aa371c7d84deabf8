"""A checkpoint's chat template, rendered as transformers renders it.

The variables, filters and settings are those of "Chat templates" in the documentation of
transformers, for which model makers write templates. A template is a program: loops can nest, and a
few characters can ask for a number of a gigabyte. So a process of its own compiles and renders it
(`minisgl.templates.render`), which the operating system ends at a bound of CPU time; another one
renders later prompts. A template may refuse messages, for example for the order of their roles; the
client then gets the template's own message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from minisgl.errors import CheckpointError, InvalidRequest
from minisgl.tokenizer.tokenizer import load_tokenizer_config, read_json_object
from minisgl.utils.helper import Helper, HelperEnded, packed
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

LOAD_S: Final = 5.0
"""The most CPU seconds of compiling. The templates of 60 architectures took at most 0.1 s."""

RENDER_S: Final = 1.0
RENDER_S_PER_MIB: Final = 0.5
"""The most CPU seconds of one rendering: so many, and so many more for each MiB of variables. A
chat of a million tokens takes a tenth of a second."""

MAX_PROMPT: Final = 64 * 2**20
"""The most characters of a rendered prompt: four times the largest body of a request."""

MAX_MEMORY: Final = 2**30
"""The most bytes that a renderer may take, on Linux. The largest prompt takes a quarter of them."""

LARGE: Final = 2**18
"""Prompts whose variables have more bytes are rendered by a second process, so that ordinary ones
do not wait for them."""


class Part(dict[str, Any]):
    """A part of a message that the template gets as it is: a text, or the place of an image."""


class ChatTemplate:
    """Messages to the text of a prompt that ends where the assistant's answer begins.

    A checkpoint without a template, or with a broken one, can still complete text; only `render`
    refuses its messages.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """sources: templates by name: "default", and perhaps "tool_use" for prompts with tools.

        special_tokens: variables such as `bos_token`.
        """
        self._sources = dict(sources)
        self._key = hashlib.sha256(repr(sorted(self._sources.items())).encode()).hexdigest()
        self._special_tokens = dict(special_tokens)
        self._reads_thinking = any("message.thinking" in source for source in sources.values())
        self.source = sources.get("tool_use") or sources.get("default", "")

    @cached_property
    def _problem(self) -> str:
        """Why no messages can be rendered; "" if they can. This loads the template."""
        advice = "send a text prompt (/v1/completions, or LLM.generate)"
        if "default" not in self._sources:
            return f"this model has no chat template, so it cannot be asked in messages: {advice}"
        try:
            self._load(is_large=False)
        except _Refusal as error:
            problem = (
                f"the chat template of this model is broken ({error}), so it cannot be asked in "
                f"messages: {advice}"
            )
            logger.warning("%s", problem)
            return problem
        return ""

    @property
    def is_usable(self) -> bool:
        return not self._problem

    def render(
        self, messages: Sequence[Mapping[str, Any]], args: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt of `messages`. args: further variables of the template.

        With `continue_final_message` in `args`, the prompt ends with the content of the last
        message, which the model then continues; `add_generation_prompt` is then false. Raises
        InvalidRequest for malformed messages, without a usable template, or if it refuses them.
        """
        return self.fill(self.variables(messages, args))

    def variables(
        self, messages: Sequence[Mapping[str, Any]], args: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the client's messages and `args` as the template's variables. Raises
        InvalidRequest."""
        if self._problem:
            raise InvalidRequest(self._problem, param="messages")
        if not messages:
            raise InvalidRequest("messages must hold at least one message", param="messages")
        normal = [_normalise(message, i) for i, message in enumerate(messages)]
        if self._reads_thinking:
            normal = [_with_thinking(message) for message in normal]
        return {**(args or {}), "messages": normal}

    def fill(self, given: Mapping[str, Any]) -> str:
        """Return the prompt. given: see `variables`. Raises InvalidRequest."""
        is_continued = bool(given.get("continue_final_message"))
        variables = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": not is_continued,
            **self._special_tokens,
            **given,
        }
        if is_continued:
            *before, last = given["messages"]
            variables["messages"] = [*before, _with_end(last, len(before))]
        name = "tool_use" if variables["tools"] and "tool_use" in self._sources else "default"
        try:
            prompt = self._filled(name, variables)
        except _Refusal as error:
            # The text may quote halves of surrogate pairs, from the JSON of a tool call.
            text = str(error).encode(errors="backslashreplace").decode()
            raise InvalidRequest(
                f"the chat template of this model refuses these messages: {text}", param="messages"
            ) from error
        return _cut_at_end(prompt) if is_continued else prompt

    def _filled(self, name: str, variables: dict[str, Any]) -> str:
        """Return the text of a template. Raises _Refusal."""
        try:
            question = packed(["fill", self._key, name, variables, MAX_PROMPT])
        except (TypeError, ValueError, RecursionError) as error:
            raise _Refusal(f"{type(error).__name__}: {error}") from None
        is_large = len(question) > LARGE
        cpu_s = RENDER_S + RENDER_S_PER_MIB * len(question) / 2**20
        while (text := _asked(question, cpu_s, is_large)) is None:
            self._load(is_large)
        return text

    def _load(self, is_large: bool) -> None:
        """Let a renderer compile the templates. Raises _Refusal."""
        _asked(packed(["load", self._key, self._sources]), LOAD_S, is_large)


class _Refusal(Exception):
    """The template is broken, or cannot be rendered with these variables. The text says why."""


def _asked(question: bytes, cpu_s: float, is_large: bool) -> str | None:
    """Return the renderer's text; None if it has not loaded the template. Raises _Refusal."""
    try:
        kind, text = _renderer(os.getpid(), MAX_MEMORY, is_large).ask(question, cpu_s)
    except HelperEnded as error:
        raise _Refusal(f"it {error}") from None
    if kind == "problem":
        raise _Refusal(text)
    return None if kind == "unknown" else str(text)


@lru_cache(2)
def _renderer(pid: int, max_memory: int, is_large: bool) -> Helper:
    """Return a renderer of the process `pid`. A fork does not share its parent's."""
    return Helper("minisgl.templates.render", [str(max_memory)])


_END: Final = "[end-of-the-final-message-7c1f]"
"""Written behind the content of a message that is continued; the prompt is cut there."""


def _with_end(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the message with `_END` and a space behind its content. Raises InvalidRequest."""
    where = f"messages[{index}]"
    if message["role"] != "assistant":
        raise InvalidRequest(
            f"continue_final_message needs an assistant's message at the end, {where} has the role "
            f"{message['role']!r}",
            param="continue_final_message",
        )
    content = message["content"]
    if not content or not isinstance(content, str) or message.get("tool_calls"):
        raise InvalidRequest(
            f"continue_final_message needs text to continue: {where} has no content, or has "
            "images or tool calls",
            param="continue_final_message",
        )
    return {**message, "content": f"{content}{_END} "}


def _cut_at_end(prompt: str) -> str:
    """Return the prompt up to `_END`. Spaces before it stay unless the template trims contents, as
    in transformers."""
    before, found, after = prompt.rpartition(_END)
    if not found:
        raise InvalidRequest(
            "continue_final_message: the chat template of this model does not write the content of "
            "the last message",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def find_sources(folder: Path) -> dict[str, str]:
    """Return the templates of the checkpoint in `folder` by name.

    They are in chat_template.jinja, tokenizer_config.json or chat_template.json; the first file
    that has some counts. Raises CheckpointError for what is neither text nor a list of named texts.
    """
    plain = folder / "chat_template.jinja"
    if plain.exists():
        try:
            return {"default": plain.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{plain} cannot be read as text ({error}); download it again"
            ) from error
    found = load_tokenizer_config(folder).get("chat_template")
    match found or read_json_object(folder / "chat_template.json").get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*entries]:  # [{"name": "default", "template": "..."}, ...]
            with contextlib.suppress(KeyError, TypeError):  # raised below
                return {str(entry["name"]): str(entry["template"]) for entry in entries}
    raise CheckpointError(
        f"the chat_template in {folder} must be a string or a list of named templates"
    )


def _normalise(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a message as templates expect it. Raises InvalidRequest.

    Its content is a string, empty if an assistant's message has none. It has no null fields, and
    the role `system` for OpenAI's `developer`.
    """
    where = f"messages[{index}]"
    normal = {key: value for key, value in message.items() if value is not None}
    if normal["role"] == "developer":
        normal["role"] = "system"
    if "content" in normal:
        normal["content"] = _join_parts(normal["content"], f"{where}.content")
    elif normal["role"] != "assistant":
        raise InvalidRequest(
            f"{where}.content is missing: only an assistant's message may go without",
            param=f"{where}.content",
        )
    else:
        normal["content"] = ""  # Qwen3's template, for one, reads it without asking
    if isinstance(calls := normal.get("tool_calls"), list):
        normal["tool_calls"] = [_normalise_call(call) for call in calls]
    return normal


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with `reasoning_content` as `thinking`, the name in gpt-oss's template.

    That template refuses content beside thinking in a message with tool calls, and then writes the
    content as thinking. So such a message stays as it is.
    """
    reasoning = message.get("reasoning_content")
    if not reasoning or (message.get("tool_calls") and message.get("content")):
        return message
    return {"thinking": reasoning, **message}


def _join_parts(content: Any, where: str) -> str | list[Part]:
    """Return the text of a message; its parts if it has images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where} must be a string or a list of text parts, got a {type(content).__name__}",
            param=where,
        )
    texts = []
    parts = []
    for i, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
                parts.append(Part(type="text", text=text))
            case Part():
                parts.append(part)
            case _:
                kind = part.get("type") if isinstance(part, dict) else part
                raise InvalidRequest(
                    f'{where}[{i}] must be {{"type": "text", "text": "..."}}: this model reads '
                    f"text only, got {kind!r}",
                    param=f"{where}[{i}]",
                )
    return "".join(texts) if len(texts) == len(parts) else parts


def _normalise_call(call: Any) -> Any:
    """Return a call with its arguments as an object, which OpenAI has as JSON in a string."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                arguments = json.loads(text)
            except (ValueError, RecursionError):
                return call  # a model's earlier mistake, which stays as it is
            return {**call, "function": {**function, "arguments": arguments}}
    return call
