"""`AsyncLLM`: an `LLM` for asyncio. All open requests run as one batch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from minisgl.core import SamplingParams
from minisgl.llm.llm import LLM, ChatArgs, Messages, Prompt, Scope
from minisgl.llm.output import Delta, RequestOutput
from minisgl.llm.prompts import as_conversations


class AsyncLLM:
    """A model to call from asyncio.

    ::

        async with AsyncLLM("Qwen/Qwen3-0.6B") as llm:
            async for part in llm.generate("Once upon", SamplingParams(max_tokens=20)):
                if isinstance(part, Delta):
                    print(part.text, end="")

    Leaving the loop, or cancelling the task, ends the request.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Take the arguments of `LLM`. This blocks the event loop until the model is loaded; `await
        asyncio.to_thread(AsyncLLM, ...)` does not.
        """
        self._llm = LLM(model, **options)
        self._wakers: dict[asyncio.AbstractEventLoop, _Waker] = {}
        self.tokenizer = self._llm.tokenizer
        self.default_sampling_params = self._llm.default_sampling_params

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str | None = None,
    ) -> AsyncIterator[Delta | RequestOutput]:
        """Iterate over the completion of a text or of token ids while it is computed.

        Yields a `Delta` for each new piece, and last the `RequestOutput`. Raises the same errors as
        `LLM.generate`.
        """
        return self._stream(
            prompt, sampling_params, self._llm._scope(cache_salt, lora), ({}, None, "auto")
        )

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
    ) -> AsyncIterator[Delta | RequestOutput]:
        """Iterate over the answer to a conversation, as `generate` does. Arguments and errors: see
        `LLM.chat`."""
        chat = (chat_template_kwargs or {}, tools, tool_choice)
        conversations = [list(turns) for turns in as_conversations(messages)]
        return self._stream(
            conversations, sampling_params, self._llm._scope(cache_salt, lora), chat, is_chat=True
        )

    async def embed(self, texts: Any, **options: Any) -> npt.NDArray[np.float32]:
        """Do what `LLM.embed` does, in a thread. Cancelling the task does not end the request."""
        return await asyncio.to_thread(self._llm.embed, texts, **options)

    async def score(self, query: str, documents: Sequence[str], **options: Any) -> list[float]:
        """Do what `LLM.score` does, in a thread."""
        return await asyncio.to_thread(self._llm.score, query, documents, **options)

    async def aclose(self) -> None:
        """Release memory, threads and processes. Open requests end with a ConfigError."""
        await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _stream(
        self,
        prompt: Any,
        params: SamplingParams | None,
        scope: Scope,
        chat: ChatArgs,
        is_chat: bool = False,
    ) -> AsyncIterator[Delta | RequestOutput]:
        loop, has_news = asyncio.get_running_loop(), asyncio.Event()
        for other in list(self._wakers):  # a copy: another thread's loop may begin meanwhile
            if other.is_closed():
                self._wakers.pop(other, None)
        waker = self._wakers.setdefault(loop, _Waker(loop))

        def on_news(num_tokens: int, num_ended: int) -> None:
            waker.wake(has_news)

        reader = self._llm._read(prompt, params, scope, chat, on_news, is_chat)
        try:
            reader.begin()
            while True:
                has_news.clear()
                delta, is_over = reader.news()
                if delta:
                    yield delta
                elif is_over:
                    break
                else:
                    await has_news.wait()
            yield reader.output()
        finally:
            reader.leave()


class _Waker:
    """Wakes the tasks of an event loop from the engine's thread. Mutable.

    One call of the event loop wakes all tasks of a turn. A call for each of 256 streams would take
    more time than planning the step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._events: list[asyncio.Event] = []

    def wake(self, event: asyncio.Event) -> None:
        with self._lock:
            self._events.append(event)
            if len(self._events) > 1:
                return
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event.set()
