"""The attention backends of a GPU by name, and the one place that chooses.

`--attn prefill,decode` names two of them: the first takes prompts and chunks, the second decode.
"""

from __future__ import annotations

import torch

from minisgl.attention.base import BaseAttnBackend
from minisgl.attention.torch_backend import TorchAttnBackend
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.errors import ConfigError
from minisgl.kernel.cuda import num_cores
from minisgl.kernel.ops import Ops

CUDA_BACKENDS = ("auto", "triton", "torch")


def create_cuda_backend(name: str, ops: Ops, device: torch.device) -> BaseAttnBackend:
    """See `create_attention_backend`."""
    if name not in CUDA_BACKENDS:
        raise ConfigError(
            f"unknown attention backend {name!r} for a GPU; one of {', '.join(CUDA_BACKENDS)}"
        )
    if name == "torch":
        return TorchAttnBackend(ops)
    return TritonAttnBackend(ops, num_cores(device))
