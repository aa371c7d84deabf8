"""A conversation over /v1/chat/completions: its messages, and streamed answers.

A base model has no chat template. It completes each text over /v1/completions instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from minisgl.errors import MinisglError
from minisgl.utils.text import counted
from minisgl_gateway.http import http_client, server_root
from minisgl_gateway.shell.settings import Settings

# No timeout for reading: on a CPU the prefill of a long prompt may take minutes, and the end of a
# server closes the connection.
TIMEOUT: Final = httpx.Timeout(None, connect=5.0)

COMPLETED_TOKENS: Final = 200
"""The most tokens of a base model's text, unless `max_tokens` is set: it seldom ends by itself."""

TOO_LONG: Final = "context_length_exceeded"
NO_KEY: Final = "invalid_api_key"


class ChatError(Exception):
    """The server refuses, fails or does not answer. The message is a sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The tokens and times of one answer. The server counts tokens and says how long they took, as
    all may come in one piece; if it does not, the client measures it, and always the first one's.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: float
    decode_s: float
    finish_reason: str

    def __str__(self) -> str:
        rate = ""
        if self.num_output_tokens > 1 and self.decode_s > 0:
            rate = f", then {(self.num_output_tokens - 1) / self.decode_s:.1f} tokens/s"
        cut = ", cut off by the length limit" if self.finish_reason == "length" else ""
        return (
            f"{counted(self.num_output_tokens, 'token')}{cut}; first after "
            f"{1000 * self.first_token_s:.0f} ms{rate}; {self.num_cached_tokens} of "
            f"{counted(self.num_prompt_tokens, 'prompt token')} cached"
        )


class Chat:
    """A conversation with the model of the server at `url`. Mutable: it keeps the messages.

    Each turn sends all of them. The server has the earlier ones in its prefix cache.
    """

    def __init__(
        self,
        url: str,
        *,
        system: str | None = None,
        settings: Settings | None = None,
        api_key: str | None = None,
    ) -> None:
        """Raises ChatError for an invalid URL."""
        self._url = url
        self._has_key = bool(api_key)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = http_client(server_root(url), timeout=TIMEOUT, headers=headers)
        except httpx.InvalidURL as error:
            raise self._unreachable(error) from error
        except MinisglError as error:
            raise ChatError(str(error)) from error
        self.settings = settings or Settings()
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._question = ""
        self._is_answered = True
        self.cost: Cost | None = None  # of the last answer; None if that was stopped or failed

    @property
    def model(self) -> str:
        """The served model's name. Raises ChatError."""
        return str(self._entry["id"])

    @property
    def is_base(self) -> bool:
        """Whether the server says that its model has no chat template."""
        try:
            return self._entry.get("has_chat_template") is False
        except ChatError:  # the request itself says what is wrong
            return False

    @cached_property
    def _entry(self) -> dict[str, Any]:
        """The model's entry in /v1/models, which has an id."""
        try:
            response = self._http.get("/v1/models")
            self._check(response)
            entry: dict[str, Any] = response.json()["data"][0]
            if "completion" not in entry.get("capabilities", ["completion"]):
                raise ChatError(f"{entry['id']} writes no texts; chat with another model")
            return {"id": entry["id"], **entry}
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._not_ours() from error

    def reset(self, system: str | None = None) -> None:
        """Delete all messages. system: the new system prompt; None for none."""
        self._system = system
        self._turns = []
        self._question = ""

    def close(self) -> None:
        self._http.close()

    def take_back(self) -> str:
        """Delete the last question and its answer. Returns the question; "" if there is none."""
        if self._is_answered:
            del self._turns[-2:]
            self._is_answered = False
        return self._question

    def save(self, path: str) -> None:
        """Write the conversation to a file, as the JSON of a request. Raises ChatError."""
        if self.is_base:
            raise ChatError(f"{self.model} is a base model: there is no conversation to save")
        body = {"messages": self._messages(), **self.settings.as_fields()}
        try:
            Path(path).expanduser().write_text(
                json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise ChatError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: str) -> int:
        """Continue the conversation of a file that `save` wrote. Returns the number of its turns.

        Raises ChatError; then nothing has changed.
        """
        try:
            body = json.loads(Path(path).expanduser().read_bytes())
            messages = [{k: str(m[k]) for k in ("role", "content")} for m in body.pop("messages")]
        except OSError as error:
            raise ChatError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, AttributeError):
            messages = None
        roles = [message["role"] for message in messages or ()]
        has_system = roles[:1] == ["system"]
        turns = (len(roles) - has_system) // 2
        if messages is None or roles[has_system:] != ["user", "assistant"] * turns:
            raise ChatError(f"{path} is no conversation that /save wrote")
        try:
            self.settings.replace(body)
        except MinisglError as error:
            raise ChatError(f"{path}: {error}") from error
        self._system = messages.pop(0)["content"] if has_system else None
        self._turns = messages
        self._question = messages[-2]["content"] if messages else ""
        self._is_answered = bool(messages)
        return turns

    def ask(self, text: str) -> Generator[str, None, None]:
        """Stream the answer to `text`. Closing the generator stops the answer, and keeps its text
        so far. A base model completes `text`, and keeps nothing.

        Raises ChatError; then neither question nor answer is kept.
        """
        self.cost = None
        self._question, self._is_answered = text, False
        question = {"role": "user", "content": text}
        if self.is_base:
            asked: dict[str, Any] = {"prompt": text, "max_tokens": COMPLETED_TOKENS}
            if self._system:
                raise ChatError(
                    f"{self.model} is a base model, which has no system prompt: write its text "
                    "before the text to complete"
                )
        else:
            asked = {"messages": [*self._messages(), question]}
        body = {
            **asked,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.settings.as_fields(),
        }
        answer: list[str] = []
        try:
            yield from self._stream(body, answer)
        except httpx.HTTPError as error:
            answer.clear()
            raise self._unreachable(error) from error
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
            answer.clear()
            raise self._not_ours() from error
        finally:
            if answer and not self.is_base:
                self._turns += [question, {"role": "assistant", "content": "".join(answer)}]
                self._is_answered = True

    def _messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    def _stream(self, body: dict[str, Any], answer: list[str]) -> Iterator[str]:
        began = time.monotonic()
        first = last = began
        reason = "stop"
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        with self._http.stream("POST", path, json=body) as response:
            self._check(response)
            for data in _data(response.iter_bytes()):
                if data.strip() == b"[DONE]":
                    continue
                chunk = msgspec.json.decode(data)
                if "error" in chunk:
                    answer.clear()
                    raise self._refused(chunk["error"])
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or reason
                    text = choice["text"] if "text" in choice else choice["delta"].get("content")
                    if text:
                        last = time.monotonic()
                        first = last if first == began else first
                        answer.append(text)
                        yield text
                if usage := chunk.get("usage"):
                    self.cost = Cost(
                        num_prompt_tokens=usage["prompt_tokens"],
                        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                        num_output_tokens=usage["completion_tokens"],
                        first_token_s=(first if answer else time.monotonic()) - began,
                        decode_s=(chunk.get("timings") or {}).get("decode_s", last - first),
                        finish_reason=reason,
                    )

    def _check(self, response: httpx.Response) -> None:
        if response.status_code >= 400:
            response.read()
            try:
                raise self._refused(response.json()["error"])
            except (ValueError, LookupError, TypeError, AttributeError):
                status = response.status_code
                raise ChatError(f"the server answered with HTTP {status}") from None

    def _refused(self, error: dict[str, Any]) -> ChatError:
        if error.get("code") == NO_KEY and not self._has_key:
            return ChatError("this server needs an API key: give one with --api-key KEY")
        is_full = error.get("code") == TOO_LONG and self._turns
        more = " The conversation fills the context: /reset starts a new one." if is_full else ""
        return ChatError(f"{error['message']}{more}")

    def _not_ours(self) -> ChatError:
        return ChatError(f"{self._url} answers, but not as a Mini-SGLang server does")

    def _unreachable(self, error: Exception) -> ChatError:
        return ChatError(f"there is no server at {self._url} ({error or type(error).__name__})")


def _data(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of a stream's lines. `httpx.Response.iter_lines` breaks a line at U+2028, too,
    which a model may write."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line[5:] for line in lines if line.startswith(b"data:"))
