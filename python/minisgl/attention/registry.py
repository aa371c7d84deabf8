"""The attention backends by name, and the one place that chooses."""

from __future__ import annotations

from minisgl.attention.base import BaseAttnBackend
from minisgl.attention.torch_backend import TorchAttnBackend
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops

ATTENTION_BACKENDS = ("auto", "torch")


def create_attention_backend(name: str, ops: Ops) -> BaseAttnBackend:
    """The backend called `name`, on the device of `ops`. Raises ConfigError for a name not ours."""
    if name in ("auto", "torch"):
        return TorchAttnBackend(ops)
    raise ConfigError(f"unknown attention backend {name!r}; one of {', '.join(ATTENTION_BACKENDS)}")
