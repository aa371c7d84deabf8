"""Creates the attention backend by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.attention.base import (
    ATTENTION_BACKENDS,
    CUDA_BACKENDS,
    DECODE_BACKENDS,
    PREFILL_BACKENDS,
    BaseAttnBackend,
)
from minisgl.attention.cpu_backend import CpuAttnBackend
from minisgl.attention.torch_backend import TorchAttnBackend
from minisgl.errors import ConfigError
from minisgl.kernel.jit import load_library
from minisgl.kernel.once import JitUnavailable
from minisgl.kernel.ops import Ops
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

CPU = torch.device("cpu")


def create_attention_backend(
    name: str,
    ops: Ops,
    device: torch.device = CPU,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 128,
    latent: int | None = None,
    page_size: int = 16,
    needs: Sequence[str] = (),
) -> BaseAttnBackend:
    """Return the backend called `name` on `device`; "auto" is the fastest that works here. "torch"
    is the reference; no graph of a GPU can capture it.

    dtype, head_dim, latent, page_size: of the KV pool, see `AttnLayer`; not every backend supports
    all values. needs: see `ModelSpec.attention`. Raises ConfigError for a name that does not exist
    on the device, or a backend that does not work here.
    """
    if name == "torch":
        return TorchAttnBackend(ops)
    if device.type == "cuda":
        from minisgl.attention.cuda import create_cuda_backend  # imports Triton

        return create_cuda_backend(name, ops, device, dtype, head_dim, latent, page_size, needs)
    if name not in ATTENTION_BACKENDS:
        of_a_gpu = {*CUDA_BACKENDS, *PREFILL_BACKENDS, *DECODE_BACKENDS}
        if of_a_gpu.issuperset(name.split(",")):
            wrong = f"attention backend {name!r} is for a GPU; on a CPU"
        else:
            wrong = f"unknown attention backend {name!r};"
        raise ConfigError(f"{wrong} choose one of {', '.join(ATTENTION_BACKENDS)}")
    try:
        library = getattr(ops, "calls", None) or load_library()
    except JitUnavailable as error:
        if name == "cpu":
            raise ConfigError(f"attention backend 'cpu' needs its C++ kernels: {error}") from error
        logger.warning("attention: plain torch, several times slower (%s)", error)
        return TorchAttnBackend(ops)
    return CpuAttnBackend(library)
