"""Creates the attention backends of a GPU by name.

`--attn prefill,decode` names two of them: the first takes prompts and chunks, the second decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl import plugins
from minisgl.attention.base import (
    CUDA_BACKENDS,
    DECODE_BACKENDS,
    LATENTS,
    PREFILL_BACKENDS,
    SINKS,
    BaseAttnBackend,
)
from minisgl.attention.flash_attn import FlashAttentionBackend
from minisgl.attention.flash_infer import FlashInferBackend, TensorRTLLMBackend
from minisgl.attention.paged import HybridBackend, PagedAttnBackend, unusable
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.errors import ConfigError
from minisgl.kernel.cuda import num_cores
from minisgl.kernel.ops import Ops
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


SERVED = {"fa": (SINKS, LATENTS)}
"""Backend -> the needs (`minisgl.attention.base`) that it serves. triton serves all."""


def create_cuda_backend(
    name: str,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    latent: int | None,
    page_size: int,
    needs: Sequence[str],
) -> BaseAttnBackend:
    """See `create_attention_backend`. `name` is not torch."""

    def check(part: str) -> None:
        """Raise ConfigError if a backend other than triton does not serve the model."""
        lacking = [need for need in needs if need not in SERVED.get(part, ())]
        if dtype.itemsize == 1:
            raise unusable(part, "does not read a KV cache of 8 bits (--kv-cache-dtype)")
        if lacking:
            raise unusable(part, f"has no {' and no '.join(lacking)}, which this model needs")

    def create(part: str) -> PagedAttnBackend:
        if part == "triton":
            twin = plugins.find("attention", "triton")
            triton: TritonAttnBackend = (twin or TritonAttnBackend)(ops, num_cores(device), device)
            return triton
        if part == "fa":
            check(part)
            return FlashAttentionBackend(ops, device, dtype, head_dim, latent, needs)
        raise ConfigError(
            f"unknown attention backend {part!r} for a GPU; one of auto, torch, "
            f"{', '.join(CUDA_BACKENDS)}, or two of them as prefill,decode; as prefill also "
            f"{', '.join(PREFILL_BACKENDS)}, as decode also {', '.join(DECODE_BACKENDS)}"
        )

    def create_prefill(part: str) -> PagedAttnBackend:
        if part == "fi":
            check(part)
            return FlashInferBackend(ops, device, dtype, head_dim)
        is_hopper = torch.cuda.get_device_capability(device)[0] == 9
        if part == "fa2" or (part == "fa" and not is_hopper):
            check("fa2")
            fa2 = plugins.need("attention", "fa2", "attention backend 'fa2'")
            backend: PagedAttnBackend = fa2(ops, device, dtype, head_dim)
            return backend
        return create(part)

    def create_decode(part: str) -> PagedAttnBackend:
        if part == "trtllm":
            check(part)
            return TensorRTLLMBackend(ops, device, dtype, head_dim, page_size)
        return create(part)

    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or more; choose int8"
        )
    if name != "auto":
        prefill, _, decode = name.partition(",")
        if not decode or decode == prefill:
            return create(prefill)
        return HybridBackend(ops, create_prefill(prefill), create_decode(decode))
    # FlashAttention 3 is faster on prompts, ours in most decode steps, but not with latents
    # (minisgl_kernels/README.md).
    triton = create("triton")
    try:
        fa = create("fa")
    except ConfigError as error:
        logger.info("attention: triton (%s)", error)
        return triton
    chosen = HybridBackend(ops, fa, triton) if latent is None else fa
    logger.info("attention: %s", chosen.name)
    return chosen
