"""The attention backends of a GPU by name, and the one place that chooses.

`--attn prefill,decode` names two of them: the first takes prompts and chunks, the second decode.
"""

from __future__ import annotations

import torch

from minisgl.attention.base import BaseAttnBackend
from minisgl.attention.flash_attn import FlashAttentionBackend
from minisgl.attention.paged import HybridBackend, PagedAttnBackend
from minisgl.attention.torch_backend import TorchAttnBackend
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.errors import ConfigError
from minisgl.kernel.cuda import num_cores
from minisgl.kernel.ops import Ops
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

CUDA_BACKENDS = ("triton", "fa")


def create_cuda_backend(name: str, ops: Ops, device: torch.device) -> BaseAttnBackend:
    """See `create_attention_backend`. "torch" is the reference; it is not for a graph."""
    if name == "torch":
        return TorchAttnBackend(ops)
    if name == "auto":
        return _choose(ops, device)
    prefill, _, decode = name.partition(",")
    backends = {part: _create(part, ops, device) for part in (prefill, decode or prefill)}
    if len(backends) == 1:
        return backends[prefill]
    return HybridBackend(ops, backends[prefill], backends[decode])


def _create(name: str, ops: Ops, device: torch.device) -> PagedAttnBackend:
    if name == "triton":
        return TritonAttnBackend(ops, num_cores(device))
    if name == "fa":
        return FlashAttentionBackend(ops, device)
    raise ConfigError(
        f"unknown attention backend {name!r} for a GPU; one of auto, torch, "
        f"{', '.join(CUDA_BACKENDS)}, or two of them as prefill,decode"
    )


def _choose(ops: Ops, device: torch.device) -> BaseAttnBackend:
    """FlashAttention 3 for prompts where it is there, Triton for the rest."""
    triton = _create("triton", ops, device)
    try:
        chosen = HybridBackend(ops, _create("fa", ops, device), triton)
    except ConfigError as error:
        logger.info("attention: triton (%s)", error)
        return triton
    logger.info("attention: %s", chosen.name)
    return chosen
