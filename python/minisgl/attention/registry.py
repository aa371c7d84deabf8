"""The attention backends by name, and the one place that chooses."""

from __future__ import annotations

from minisgl.attention.base import BaseAttnBackend
from minisgl.attention.cpu_backend import CpuAttnBackend
from minisgl.attention.torch_backend import TorchAttnBackend
from minisgl.errors import ConfigError
from minisgl.kernel.jit import JitUnavailable, load_library
from minisgl.kernel.ops import Ops
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

ATTENTION_BACKENDS = ("auto", "cpu", "torch")


def create_attention_backend(name: str, ops: Ops) -> BaseAttnBackend:
    """The backend called `name`; "auto" is the fastest that works here.

    Raises ConfigError for a name that is not in `ATTENTION_BACKENDS`, and for one that was asked
    for by name and does not work here.
    """
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"unknown attention backend {name!r}; choose one of {', '.join(ATTENTION_BACKENDS)}"
        )
    if name == "torch":
        return TorchAttnBackend(ops)
    try:
        return CpuAttnBackend(load_library())
    except JitUnavailable as error:
        if name == "cpu":
            raise ConfigError(f"attention backend 'cpu' needs its C++ kernels: {error}") from error
        logger.warning("attention: plain torch, several times slower (%s)", error)
        return TorchAttnBackend(ops)
