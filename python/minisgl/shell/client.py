"""One chat over /v1/chat/completions: its history, and streamed answers with their cost."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from minisgl.utils.text import counted

# Loading a long prompt may take minutes on a CPU; a server that is gone closes the connection.
TIMEOUT: Final = httpx.Timeout(None, connect=5.0)


class ChatError(Exception):
    """The server refused or failed, or is not there; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one answer took, as the client saw it; token counts are the server's."""

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
    """A conversation with the model that `url` serves. Mutable: it remembers what was said.

    Each turn sends the whole history, whose prefix the server has cached.
    """

    def __init__(self, url: str) -> None:
        """Raises ChatError for what is no URL."""
        root = url.rstrip("/").removesuffix("/v1")  # OpenAI's clients are told of it with /v1
        self._url = url
        try:
            self._http = httpx.Client(base_url=root, timeout=TIMEOUT)
        except httpx.InvalidURL as error:
            raise self._unreachable(error) from error
        self._system: str | None = None
        self._turns: list[dict[str, str]] = []
        self.cost: Cost | None = None  # of the last answer; None if it did not end by itself

    def model(self) -> str:
        """The served model's name. Raises ChatError."""
        try:
            response = self._http.get("/v1/models")
            _check(response)
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError) as error:
            raise self._not_ours() from error

    def reset(self, system: str | None = None) -> None:
        """Forget everything; `system` is what the model is told first."""
        self._system = system
        self._turns = []

    def close(self) -> None:
        self._http.close()

    def ask(self, text: str) -> Generator[str, None, None]:
        """Stream the answer to `text`. Closing the iterator stops it; what came is remembered.

        Raises ChatError; the question is then forgotten.
        """
        self.cost = None
        system = [{"role": "system", "content": self._system}] if self._system else []
        question = {"role": "user", "content": text}
        body = {
            "messages": [*system, *self._turns, question],
            "stream": True,
            "stream_options": {"include_usage": True},
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
            if answer:
                self._turns += [question, {"role": "assistant", "content": "".join(answer)}]

    def _stream(self, body: dict[str, Any], answer: list[str]) -> Iterator[str]:
        began = time.monotonic()
        first = last = began
        reason = "stop"
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            _check(response)
            for line in response.iter_lines():
                field, _, data = line.partition(":")
                if field != "data" or data.strip() == "[DONE]":
                    continue  # empty lines, comments
                chunk = msgspec.json.decode(data)
                if "error" in chunk:
                    answer.clear()
                    raise ChatError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or reason
                    if text := choice["delta"].get("content"):
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
                        decode_s=last - first,
                        finish_reason=reason,
                    )

    def _not_ours(self) -> ChatError:
        return ChatError(f"{self._url} answers, but not as a Mini-SGLang server does")

    def _unreachable(self, error: Exception) -> ChatError:
        return ChatError(f"there is no server at {self._url} ({error or type(error).__name__})")


def _check(response: httpx.Response) -> None:
    if response.status_code >= 400:
        response.read()
        try:
            raise ChatError(response.json()["error"]["message"])
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"the server answered with HTTP {response.status_code}") from None
