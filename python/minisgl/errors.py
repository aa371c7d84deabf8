"""The errors that Mini-SGLang raises on purpose, as one tree.

::

    MinisglError
    ├─ ConfigError(ValueError)    before any process starts: a flag or a checkpoint is wrong
    │  ├─ UnsupportedModel        no model family here builds this config.json
    │  └─ CheckpointError         the files, names or shapes of a checkpoint do not fit
    ├─ RequestError(ValueError)   one request is wrong; the API answers it with a 4xx
    │  ├─ InvalidRequest          a field has a wrong type or value, or is not supported
    │  ├─ InvalidSampling         a sampling parameter is out of its bounds
    │  ├─ PromptTooLong           the prompt does not fit the context or the KV cache
    │  ├─ ModelNotFound           the request names a model that is not served
    │  └─ ServerBusy              the waiting queue is full (HTTP 429)
    └─ EngineError(RuntimeError)  a worker cannot continue; the API answers with a 5xx
       ├─ WorkerDied              a process of the server ended
       ├─ WorkerHung              a process of the server is stopped or hangs
       ├─ StartupFailed           a process of the server could not start
       ├─ PeerLost                a rank cannot reach another rank
       ├─ NonFiniteLogits         the model computed NaN or infinity for one request
       ├─ OutOfDeviceMemory       an allocation failed; the message says which option to change
       └─ AdapterLost             an adapter's files have changed or are gone; its requests fail

An error that crosses a process keeps its class, which its `code` names, and its `fields`.
`assert` states our own invariants. User input never meets an assert.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, ClassVar

PEER_LOST_EXIT = 3
"""Exit code of a worker process that lost another rank. After an error of its own it is 1."""

CONTEXT_IS = "this model's maximum context length is"
"""OpenAI's words before the limit of a `PromptTooLong`. LiteLLM, aider and others know it by them,
and compact the chat or take another model; LangChain knows it by "prompt is too long"."""


class MinisglError(Exception):
    """Root of the tree. fields: the attributes that cross a process besides the message."""

    fields: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle and copy keep an error as it is: its class may take other arguments."""
        return type(self).__new__, (type(self), *self.args), vars(self)


class ConfigError(MinisglError, ValueError):
    """The settings or the checkpoint cannot work. Raised before any process starts serving."""


class UnsupportedModel(ConfigError):
    """No model family here builds this architecture."""


class CheckpointError(ConfigError):
    """A checkpoint's files, tensor names or shapes do not fit the model."""


class RequestError(MinisglError, ValueError):
    """One request cannot be served. Others are not affected.

    code: OpenAI's `error.code`. param: the wrong field. status: of HTTP.
    """

    code: str = "invalid_request"
    status: int = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message  # to which a caller may add which prompt it is about


class InvalidRequest(RequestError):
    """A field is missing, has a wrong type or value, or is not supported."""

    code = "invalid_value"


class InvalidSampling(RequestError):
    """A sampling parameter is out of its bounds."""

    code = "invalid_sampling"


class PromptTooLong(RequestError):
    """The prompt, alone or with max_tokens, has `got` tokens; at most `limit` fit."""

    code = "context_length_exceeded"
    fields = ("limit", "got")

    def __init__(self, message: str, *, limit: int, got: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.limit = limit
        self.got = got


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    code = "model_not_found"
    status = 404


class ServerBusy(RequestError):
    """The waiting queue is full; the same request may succeed later."""

    code = "server_busy"
    status = 429


class EngineError(MinisglError, RuntimeError):
    """A worker cannot continue. Its requests fail with this error.

    is_passing: the server starts the workers again.
    """

    code: str = "engine_error"
    status: int = 500
    is_passing: bool = False


class WorkerDied(EngineError):
    """A process of the server, or of an `LLM`, ended unasked."""

    code = "worker_died"
    status = 503
    fields = ("worker", "exit_code")

    def __init__(self, worker: str, exit_code: int | None) -> None:
        if exit_code is None:
            how = "is gone"  # the system still frees its resources, such as GPU memory
        elif exit_code == PEER_LOST_EXIT:
            how = "has lost another rank, which ended or did not answer"
        elif exit_code < 0:
            how = f"was killed by signal {-exit_code}"
            if exit_code == -signal.SIGKILL:
                how += ", as the system does when memory runs out"
        else:
            how = f"ended with exit code {exit_code}"
        super().__init__(f"the {worker} process {how}; the engine cannot go on without it")
        self.worker = worker
        self.exit_code = exit_code


class WorkerHung(EngineError):
    """A process of the server, or of an `LLM`, is stopped or makes no progress.

    how: the rest of the sentence "the NAME process ...".
    """

    code = "worker_hung"
    status = 503
    fields = ("worker",)

    def __init__(self, worker: str, how: str) -> None:
        super().__init__(f"the {worker} process {how}; the engine cannot go on without it")
        self.worker = worker


class StartupFailed(EngineError):
    """A process of the server could not start; the message names the cause."""


class PeerLost(EngineError):
    """A rank cannot reach another rank, most likely because that rank ended."""


class NonFiniteLogits(EngineError):
    """The model computed NaN or infinity for one request. Only that request fails."""

    code = "non_finite_logits"

    def __init__(self) -> None:
        super().__init__(
            "the model computed NaN or infinity instead of logits for this request: its weights "
            "are damaged, or a value overflowed the number format (try --dtype bfloat16 or float32)"
        )


class OutOfDeviceMemory(EngineError):
    """The device has no memory left for an allocation."""

    code = "out_of_memory"


class AdapterLost(EngineError):
    """An adapter's files have changed since it was loaded, or are gone. Its requests fail.

    digest, folder: the adapter (`minisgl.core.adapters`).
    """

    code = "adapter_lost"
    fields = ("digest", "folder")

    def __init__(self, message: str, *, digest: str, folder: str) -> None:
        super().__init__(message)
        self.digest, self.folder = digest, folder


def class_of(code: str, status: int) -> type[RequestError] | type[EngineError]:
    """Return the class of the errors with this code, else one for a code that has no class."""
    kind = RequestError if status < 500 else EngineError
    named = (each for each in _subclasses(kind) if vars(each).get("code") == code)
    return next(named, InvalidRequest if kind is RequestError else EngineError)


def _subclasses(kind: type[RequestError] | type[EngineError]) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
