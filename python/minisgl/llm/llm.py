"""`LLM`: prompts in, outputs out, without a server."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from minisgl import env, plugins
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.core.adapters import Adapter, adapter_of, read_adapters
from minisgl.core.aliases import own_keywords
from minisgl.core.args import (
    CacheKind,
    DeviceName,
    DTypeName,
    EngineConfig,
    KVCacheDType,
    ModelSource,
    Quantization,
)
from minisgl.core.options import SWITCH, check_option, options_of
from minisgl.core.req import FloatArray
from minisgl.core.sampling import ONLY_EMBEDS, PoolingKind
from minisgl.errors import InvalidRequest, RequestError
from minisgl.llm.engines import OwnEngine
from minisgl.llm.keywords import naming_keywords
from minisgl.llm.output import RequestOutput
from minisgl.llm.progress import Bar, progress_bar
from minisgl.llm.prompts import (
    Records,
    chat_records,
    check_salt,
    is_conversation,
    params_of_each,
    prompt_records,
)
from minisgl.llm.session import Call, LLMEngine, OnNews, Session
from minisgl.llm.stream import Reader, Stream
from minisgl.message import UserMsg
from minisgl.message.pooling import Pooling, ReadRecipe, Recipe, only_task
from minisgl.runtime.args import RuntimeArgs
from minisgl.tokenizer import Detokenizer, PromptEncoder, load_tokenizer, warn_of_unknown_ids
from minisgl.tokenizer.defaults import end_of_sequence_ids, sampling_defaults
from minisgl.utils.hf import fetched_adapters, fetched_draft_model, read_json, resolve_checkpoint

T = TypeVar("T")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
ChatArgs = tuple[dict[str, Any], Any, Any]
"""Variables of the chat template, tools, tool_choice."""
Scope = tuple[str, Adapter | None]
"""The namespace of the prefix cache, and the adapter."""


class LLM:
    """A model to call from Python. Mutable; the calls of several threads run as one batch.

    Several instances can exist in one process. `close` (or leaving a `with` block) releases memory,
    threads and processes. The prefix cache exists as long as the instance: if a conversation is
    sent again with one more turn, only the new part is computed. `AsyncLLM` is for asyncio.

    tokenizer: the checkpoint's; it turns text into ids and back.

    ::

        with LLM("Qwen/Qwen3-0.6B") as llm:
            for output in llm.generate(["Hello", "Once upon"], SamplingParams(max_tokens=20)):
                print(output.text)
    """

    @naming_keywords()
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_source: ModelSource = "huggingface",
        dtype: DTypeName = "auto",
        kv_cache_dtype: KVCacheDType = "auto",
        quantization: Quantization | None = None,
        lora: Mapping[str, str | Path] | None = None,
        max_loras: int = 8,
        max_lora_rank: int | None = None,
        device: DeviceName = "auto",
        attn: str = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        memory_ratio: float | None = None,
        max_running_requests: int = 256,
        max_seq_len: int | None = None,
        max_prefill_length: int | None = None,
        cache: CacheKind = "radix",
        drafts: str = "off",
        draft_model: str | Path | None = None,
        threads: int | None = None,
        cuda_graph_max_bs: int = 256,
        tp: int = 1,
        ep: bool = False,
        disable_pynccl: bool = False,
        dummy_weight: bool = False,
        progress: bool = True,
        **original: Any,
    ) -> None:
        """model: a checkpoint folder or a model id; None for the built-in model.

        The other options are the server's flags of the same name (`--help`, or
        `minisgl.core.args`). progress: show bars, on a terminal or in a notebook, while weights
        load and while `generate` runs. Raises ConfigError for a checkpoint or an option that cannot
        work.

        With `tp` above 1 the model is split over this many processes, each on a GPU of its own; on
        a CPU they share the cores. Raises StartupFailed if such a process cannot start. If one
        dies, the call that waits for it raises WorkerDied. original: options by the names of the
        original mini-sglang (`minisgl.core.aliases`).
        """
        given = locals() | own_keywords(original)
        model = given["model"]
        env.check()
        check_option("progress", progress, SWITCH)
        options = {name: _plain(given[name]) for name in options_of(EngineConfig)}
        if isinstance(lora, Mapping):
            options["lora"] = {name: fspath(place) for name, place in lora.items()} or None
        args = RuntimeArgs(**options, offline=True)
        folder = resolve_checkpoint(
            str(model_path()) if args.model is None else args.model,
            source=args.model_source,
            weights=not args.dummy_weight,
        )
        args = replace(
            args,
            model=str(folder),
            lora=fetched_adapters(args.loras, args.model_source) or None,
            draft_model=fetched_draft_model(
                args.draft_model, args.model_source, weights=not args.dummy_weight
            ),
        )
        self._adapters = read_adapters(args.loras)
        self._progress = progress
        self.tokenizer = tokenizer = load_tokenizer(folder)
        warn_of_unknown_ids(tokenizer, folder)
        self._encoder = PromptEncoder(tokenizer=tokenizer, folder=folder)
        self._only_embeds = bool(only_task(read_json(folder / "config.json")))
        self.default_sampling_params = sampling_defaults(folder)
        self._engine: LLMEngine
        with self._bar("loading weights") as bar:
            if args.tp > 1:
                # Here, because one rank needs no sockets and no supervision.
                from minisgl.llm.ranks import OwnRanks

                self._engine = OwnRanks(args)
            else:
                eos_ids = end_of_sequence_ids(folder, tokenizer)
                self._engine = OwnEngine(args, eos_ids, bar.update)
        self._session = Session(self._engine, Detokenizer(tokenizer))

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        n: int = 1,
        cache_salt: str = "",
        lora: str | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt, a text or token ids, or several prompts as one batch.

        sampling_params: one for all prompts, or one for each; None takes the checkpoint's
        recommendation (`default_sampling_params`). n: the number of choices of each prompt, which
        are consecutive in the result. cache_salt: only calls with the same value share prefixes in
        the cache. lora: the name of an adapter, None for the model itself. Raises RequestError,
        which names the prompt, if one cannot be served; the other prompts of the call are then
        aborted.
        """
        scope = self._scope(cache_salt, lora)
        return self._run(prompt_records(prompts), sampling_params, n, scope)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: Params = None,
        *,
        n: int = 1,
        cache_salt: str = "",
        lora: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
    ) -> list[RequestOutput]:
        """Answer a conversation in OpenAI's form ([{"role": "user", "content": "Hi"}]), or several.

        A message's content may be a list of texts and images: {"type": "image", "image": ...} with
        an image of PIL or a path, or parts as in chat completions.

        n, cache_salt, lora: as for `generate`. chat_template_kwargs: further variables for the
        checkpoint's chat template. tools: functions that the model may call, in OpenAI's form. With
        a list, even an empty one, `RequestOutput` separates reasoning and calls from the text.
        tool_choice: "auto", "none", "required", or a function as {"type": "function", "function":
        {"name": ...}}.
        """
        records = chat_records(messages, chat_template_kwargs or {}, tools, tool_choice)
        return self._run(records, sampling_params, n, self._scope(cache_salt, lora))

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
    ) -> Stream:
        """Iterate over the answer to one prompt, or one conversation, while it is computed.

        Yields a `Delta` for each new piece of text, and last the `RequestOutput`. Leaving the loop,
        or closing the returned `Stream`, ends the request. The other arguments are those of `chat`.
        Raises the same errors as `generate`.
        """
        chat = (chat_template_kwargs or {}, tools, tool_choice)
        news: queue.SimpleQueue[None] = queue.SimpleQueue()
        reader = self._read(
            prompt, sampling_params, self._scope(cache_salt, lora), chat, lambda *_: news.put(None)
        )
        return Stream(reader, news)

    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: PoolingKind | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        lora: str | None = None,
    ) -> FloatArray:
        """Return the embeddings of one text, or several, as rows: float32 [N, D].

        The checkpoint's files say how it embeds; without such files a decoder embeds by its last
        token, normalised, and an encoder by the mean. prompt_name: of the released prompt that goes
        before each text, such as "query". dimensions: keep so many. pooling: instead of the
        checkpoint's. truncate_prompt_tokens: cut longer texts to so many; -1 is to what the model
        takes. The others, and errors: see `generate`.
        """
        records, _ = prompt_records(texts)
        asked = self._recipe.embed(
            list(records),
            prompt_name=prompt_name,
            dimensions=dimensions,
            pooling=pooling,
            max_tokens=truncate_prompt_tokens,
            context=self._engine.context,
        )
        return self._pool(asked, self._scope(cache_salt, lora))

    def score(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        lora: str | None = None,
    ) -> list[float]:
        """Return how relevant each document is for the query, or for its own one.

        An embedder compares embeddings (cosine, -1 to 1). A cross-encoder reads each pair, and its
        released activation makes the score. Any other model is asked about each pair, as
        Qwen3-Reranker is, and the score is the probability of "yes". instruction: what counts as
        relevant, for these. truncate_prompt_tokens: of `embed`; of a pair, the document is cut.
        """
        asked = self._recipe.rank(
            [query] if isinstance(query, str) else query,
            documents,
            instruction=instruction,
            max_tokens=truncate_prompt_tokens,
            context=self._engine.context,
        )
        return self._pool(asked, self._scope(cache_salt, lora))

    @cached_property
    def _recipe(self) -> Recipe:
        read: ReadRecipe = plugins.need("pooling", "recipe", "LLM.embed")
        return read(self._encoder.folder)

    def _pool(self, asked: Pooling[T], scope: Scope) -> T:
        with asked.naming():
            outputs = self._run((iter(asked.prompts), len(asked.prompts)), asked.sampling, 1, scope)
        return asked.finish([output.pooled for output in outputs])

    def close(self) -> None:
        """Release memory, threads and processes, and end open calls with a ConfigError.

        A second call does nothing.
        """
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, records: Records, params: Params, n: int, scope: Scope) -> list[RequestOutput]:
        with self._bar("prompts") as bar:
            call = self._call(records, params, n, scope, bar.show)
            bar.update(0, len(call.requests))
            self._session.complete(call)
        return call.outputs()

    def _call(
        self, records: Records, params: Params, n: int, scope: Scope, on_news: OnNews
    ) -> Call:
        """Encode the prompts. Raises RequestError with the index of a wrong prompt."""
        prompts, num_prompts = records
        params = self.default_sampling_params if params is None else params
        of_each = params_of_each(params, num_prompts, n)
        if self._only_embeds and not all(each.pooling for each in of_each):
            raise InvalidRequest(ONLY_EMBEDS)
        namespace, adapter = scope
        messages: list[UserMsg] = []
        with _naming_the_prompt(messages, num_prompts, n):
            for prompt, sampling in zip(prompts, of_each, strict=True):
                encoded = self._encoder.encode(prompt)
                for choice in range(n):
                    seeded = sampling.with_seed(choice)
                    request = self._encoder.request(encoded, seeded, namespace, adapter=adapter)
                    messages.append(request)
        return self._session.call(messages, on_news, n)

    def _read(
        self,
        prompt: Any,
        params: SamplingParams | None,
        scope: Scope,
        chat: ChatArgs,
        on_news: OnNews,
        is_chat: bool = False,
    ) -> Reader:
        """Return what sends one prompt to the loop: a text, ids or a conversation. is_chat: it must
        be a conversation. Raises InvalidRequest."""
        is_chat = is_chat or is_conversation(prompt)
        if not is_chat and chat != ({}, None, "auto"):
            is_named = isinstance(chat[0], dict)
            name = next(iter(chat[0]), "tools") if is_named else "chat_template_kwargs"
            raise InvalidRequest(f"{name} is for chat templates, so for conversations", param=name)
        records, count = chat_records(prompt, *chat) if is_chat else prompt_records(prompt)
        if count != 1:
            raise InvalidRequest(
                f"a stream has one prompt, got {count}; call stream for each, or generate",
                param="prompts",
            )
        return Reader(self._session, self._call((records, 1), params, 1, scope, on_news))

    def _scope(self, cache_salt: str, lora: str | None) -> Scope:
        """Raises InvalidRequest, ModelNotFound."""
        check_salt(cache_salt)
        if lora is None:
            return cache_salt, None
        adapter = adapter_of(lora, self._adapters, "lora")
        return adapter.namespace(cache_salt), adapter

    def _bar(self, what: str) -> AbstractContextManager[Bar]:
        return progress_bar(what) if self._progress else nullcontext(Bar())


@contextmanager
def _naming_the_prompt(done: Sequence[object], num_prompts: int, n: int) -> Iterator[None]:
    """Let a refusal in the block name its prompt, which follows those in `done`, n of each."""
    try:
        yield
    except RequestError as error:
        if num_prompts > 1:
            error.message = f"prompt {len(done) // n}: {error.message}"
        raise


def _plain(value: Any) -> Any:
    """Return a path as a text, a NumPy number as a Python number, which does not overflow, and
    another value as it is."""
    if isinstance(value, PathLike):
        return fspath(value)
    return value.item() if isinstance(value, np.generic) else value
