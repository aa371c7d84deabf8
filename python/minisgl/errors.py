"""Every error that Mini-SGLang raises for a person, as one tree.

::

    MinisglError
    ├─ ConfigError(ValueError)    before any process starts: a flag or a checkpoint is wrong
    │  ├─ UnsupportedModel        no family of ours builds this config.json
    │  └─ CheckpointError         files, names or shapes of a checkpoint do not fit
    ├─ RequestError(ValueError)   one request is wrong; the API answers it with a 4xx
    │  ├─ InvalidRequest          a field has a wrong type or value, or asks for what is not offered
    │  ├─ InvalidSampling         a sampling parameter is out of its bounds
    │  ├─ PromptTooLong           the prompt does not fit the context or the KV pool
    │  ├─ ModelNotFound           the request names a model that is not served
    │  └─ ServerBusy              the waiting queue is full (HTTP 429)
    └─ EngineError(RuntimeError)  a worker cannot go on; the API answers with a 5xx
       ├─ WorkerDied              a process of the server is gone
       ├─ StartupFailed           a process of the server could not start
       ├─ PeerLost                a rank cannot reach the others: one of them may know why
       └─ OutOfDeviceMemory       an allocation failed; says which option to turn, which way

``assert`` states our own invariants. What a user sends never meets an assert.
"""

from __future__ import annotations

import reprlib
import signal

PEER_LOST_EXIT = 3
"""How a worker process exits that has lost another rank; with 1 on an error of its own."""


class MinisglError(Exception):
    """Root of the tree: catching it catches everything that this package raises on purpose."""


class ConfigError(MinisglError, ValueError):
    """The settings or the checkpoint cannot work. Raised before any process starts serving."""


class UnsupportedModel(ConfigError):
    """No model family here builds this architecture."""


class CheckpointError(ConfigError):
    """A checkpoint's files, tensor names or shapes do not fit the model."""


class RequestError(MinisglError, ValueError):
    """One request cannot be served; the others go on.

    ``code`` is OpenAI's machine-readable ``error.code``, ``param`` the field that is to blame,
    ``status`` the HTTP status.
    """

    code: str = "invalid_request"
    status: int = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, has a wrong type or value, or asks for what this server does not do."""

    code = "invalid_value"


class InvalidSampling(RequestError):
    """A sampling parameter is out of its bounds."""

    code = "invalid_sampling"


class PromptTooLong(RequestError):
    """The prompt, or the prompt with the tokens asked for, exceeds ``limit`` (``got`` tokens)."""

    code = "context_length_exceeded"

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
    """A worker is done for; the requests that it carried fail with this."""

    code: str = "engine_error"
    status: int = 500


class WorkerDied(EngineError):
    """A process of the server, or of an `LLM`, ended although nobody asked it to."""

    code = "worker_died"
    status = 503

    def __init__(self, worker: str, exit_code: int | None) -> None:
        if exit_code is None:
            how = "is gone"  # the system still clears up after it, a GPU's memory say
        elif exit_code == PEER_LOST_EXIT:
            how = "has lost another rank, which has ended or did not answer"
        elif exit_code < 0:
            how = f"was killed by signal {-exit_code}"
            if exit_code == -signal.SIGKILL:
                how += ", as the system does where memory runs out"
        else:
            how = f"ended with exit code {exit_code}"
        super().__init__(f"the {worker} process {how}; nothing can go on without it")
        self.worker = worker
        self.exit_code = exit_code


class StartupFailed(EngineError):
    """A process of the server could not start; the message names the cause."""


class PeerLost(EngineError):
    """A rank cannot reach the others, most likely as one of them has ended: that one knows why."""


class OutOfDeviceMemory(EngineError):
    """The device has no memory left for an allocation."""

    code = "out_of_memory"


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxlong = 40


def brief(value: object) -> str:
    """repr(value), with "..." in the middle if it is long: an error's text repeats what a client
    sent, which may be megabytes."""
    return _REPR.repr(value)


def shortened(text: str, most: int) -> str:
    """Its first `most` characters, and "..." if there are more: as `brief`, of what needs no
    quotes."""
    return text if len(text) <= most else f"{text[:most]}..."
