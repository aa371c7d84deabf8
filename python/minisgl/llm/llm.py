"""`LLM`: prompts in, outputs out, without a server."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from minisgl import env
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.core.args import (
    SWITCH,
    CacheKind,
    DeviceName,
    DTypeName,
    EngineArgs,
    ModelSource,
    Quantization,
    check_option,
    options_of,
)
from minisgl.errors import ConfigError, InvalidRequest, brief
from minisgl.llm.engines import LLMEngine, OwnEngine
from minisgl.llm.output import RequestOutput
from minisgl.llm.prompts import as_batch, as_conversations, ids_of_prompt
from minisgl.llm.session import Session
from minisgl.message import MAX_NAMESPACE, ChatPrompt, TextPrompt, TokenPrompt, UserMsg
from minisgl.tokenizer import (
    Detokenizer,
    PromptEncoder,
    load_tokenizer,
    warn_of_unknown_ids,
)
from minisgl.tokenizer.defaults import end_of_sequence_ids, sampling_defaults
from minisgl.utils.hf import resolve_checkpoint

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class LLM:
    """A model to call from Python. Mutable; calls from several threads wait for each other.

    Several instances can exist in one process. `close` (or leaving a `with` block) releases memory,
    threads and processes. The prefix cache exists as long as the instance: if a conversation is
    sent again with one more turn, only the new part is computed.

    ::

        with LLM("Qwen/Qwen3-0.6B") as llm:
            for output in llm.generate(["Hello", "Once upon"], SamplingParams(max_tokens=20)):
                print(output.text)
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_source: ModelSource = "huggingface",
        dtype: DTypeName = "auto",
        quantization: Quantization | None = None,
        device: DeviceName = "auto",
        attn: str = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        memory_ratio: float | None = None,
        max_running_requests: int = 256,
        max_seq_len: int | None = None,
        max_prefill_length: int | None = None,
        cache: CacheKind = "radix",
        cuda_graph_max_bs: int = 256,
        tp: int = 1,
        ep: bool = False,
        disable_pynccl: bool = False,
        dummy_weight: bool = False,
        progress: bool = True,
    ) -> None:
        """`model`: a checkpoint folder or a model id; None is the built-in model.

        The other options are the server's flags of the same name (`--help`, or
        `minisgl.core.args`). `progress` shows bars, on a terminal or in a notebook, while weights
        load and while `generate` runs. Raises ConfigError for a checkpoint or an option that
        cannot work.

        With `tp` above 1 the model is split over that many processes, each on its own GPU; on a CPU
        they share the cores. Raises StartupFailed if such a process cannot start. If one dies, the
        call that waits for it raises WorkerDied.
        """
        given = locals()
        env.check()
        check_option("progress", progress, SWITCH)
        options = {name: _own(given[name]) for name in options_of(EngineArgs)}
        if isinstance(model, PathLike):
            options["model"] = fspath(model)
        args = EngineArgs(**options)
        folder = resolve_checkpoint(
            str(model_path()) if args.model is None else args.model,
            source=args.model_source,
            weights=not args.dummy_weight,
        )
        self._progress = progress
        self._lock = threading.Lock()
        self._num_requests = 0
        tokenizer = load_tokenizer(folder)
        warn_of_unknown_ids(tokenizer, folder)
        self._encoder = PromptEncoder(tokenizer=tokenizer, folder=folder)
        self._detokenizer = Detokenizer(tokenizer)
        self.default_sampling_params = sampling_defaults(folder)
        self._engine: LLMEngine
        with self._bar("loading weights") as bar:
            if args.tp > 1:
                from minisgl.llm.ranks import OwnRanks

                self._engine = OwnRanks(args, folder)
            else:
                eos_ids = end_of_sequence_ids(folder, tokenizer)
                self._engine = OwnEngine(args, folder, eos_ids, bar.update)
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, or token ids; or a list of such, which run as one batch.

        sampling_params: one for all, or one for each; None takes the checkpoint's recommendation
        (`default_sampling_params`). cache_salt: only calls with the same one share the prefix
        cache. Raises RequestError, which names the prompt, if one cannot be served; then nothing of
        the call is left.
        """
        batch = as_batch(prompts)
        records = (
            TextPrompt(text=prompt)
            if isinstance(prompt, str)
            else TokenPrompt(ids=ids_of_prompt(prompt))
            for prompt in batch
        )
        return self._run(self._encode(records, len(batch)), sampling_params, cache_salt)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation in OpenAI's form ([{"role": "user", "content": "Hi"}]), or several.

        cache_salt: as for `generate`. `template_args` are further variables for the checkpoint's
        chat template.
        """
        batch = as_conversations(messages)
        records = (
            ChatPrompt(messages=[dict(turn) for turn in turns], template_args=template_args)
            for turns in batch
        )
        return self._run(self._encode(records, len(batch)), sampling_params, cache_salt)

    def close(self) -> None:
        """Release memory, threads and processes. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _encode(
        self, prompts: Iterable[TextPrompt | ChatPrompt | TokenPrompt], num_prompts: int
    ) -> list[bytes]:
        """Return the ids of each prompt. Raises InvalidRequest with the index of a wrong one."""
        encoded: list[bytes] = []
        try:
            for prompt in prompts:
                encoded.append(self._encoder.encode(prompt))
        except InvalidRequest as error:
            if num_prompts > 1:
                error.message = f"prompt {len(encoded)}: {error.message}"
                error.args = (error.message,)
            raise
        return encoded

    def _run(
        self,
        prompts: list[bytes],
        params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str,
    ) -> list[RequestOutput]:
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_NAMESPACE:
            raise InvalidRequest(
                f"cache_salt must be a string of at most {MAX_NAMESPACE} characters, got "
                f"{brief(cache_salt)}",
                param="cache_salt",
            )
        if params is None:
            params = self.default_sampling_params
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not _is_list(params) or not all(isinstance(item, SamplingParams) for item in params):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, or one for each prompt, got {params!r}",
                param="sampling_params",
            )
        if len(params) != len(prompts):
            raise InvalidRequest(
                f"there must be as many sampling_params as prompts, {len(prompts)}, or one for "
                f"all; got {len(params)}",
                param="sampling_params",
            )
        with self._lock:
            if self._is_closed:
                raise ConfigError("this LLM is closed; make a new one")
            requests = [
                UserMsg(
                    uid=self._num_requests + index,
                    ids=sampling.kept(ids),
                    sampling=_with_seed(sampling),
                    namespace=cache_salt,
                )
                for index, (ids, sampling) in enumerate(zip(prompts, params, strict=True))
            ]
            self._num_requests += len(requests)
            with self._bar("tokens") as bar:
                session = Session(requests, self._detokenizer, bar.advance)
                with session.catching_ctrl_c():
                    try:
                        self._engine.run(session)
                    except BaseException:  # a step may be lost, so the engine's state is unknown
                        self._is_closed = True
                        self._engine.close()
                        raise
        if session.error:
            raise session.error
        return session.outputs()

    def _bar(self, what: str) -> AbstractContextManager[Bar]:
        if not self._progress:
            return nullcontext(Bar())
        from minisgl.llm.progress import progress_bar

        return progress_bar(what)


class Bar:
    """A progress bar that shows nothing. `minisgl.llm.progress` has a visible one."""

    def update(self, done: int, total: int) -> None: ...

    def advance(self, count: int) -> None: ...


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """Give a request without a seed a random one."""
    if sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=secrets.randbits(63))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _own(value: T) -> T:
    """Return a NumPy number as a Python number, which does not overflow, and others unchanged."""
    return value.item() if isinstance(value, np.generic) else value
