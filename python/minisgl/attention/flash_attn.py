"""FlashAttention 3 (Shah et al. 2024) over the paged cache, on Hopper.

The kernels come from the package `sglang-kernel` (module `sgl_kernel`), which is built for several
versions of torch.

Its kernels for queries in two parts attend to latents: scores are q @ k + qv @ v, where v is the
latent and k the part of the key that rotates.

Axes: as in `minisgl.attention.paged`; B rows, E of them extend, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import SINKS, AttnLayer
from minisgl.attention.paged import (
    Extent,
    PagedAttnBackend,
    PagedMetadata,
    firsts_of_last,
    unusable,
    window_left,
)
from minisgl.core import Plan, PoolBatch
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops

HEAD_DIMS = (64, 128, 256)
"""The sizes that are tested here; the package may take more."""
LATENTS = (576, 512)
"""The head dim and the latent that are tested here. The package's kernels for them take the part of
the key that rotates as keys."""
MAX_JOINED_TOKENS = 4096
"""In steps of up to this many tokens, prompts that begin and prompts that continue are one call.
With two the device could read k and v of new prompts directly, which should save less than the
second call takes the host."""


class FlashAttentionBackend(PagedAttnBackend):
    name = "fa"
    prompts_graph_safe = True

    def __init__(
        self,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        latent: int | None,
        needs: Sequence[str],
    ) -> None:
        """needs: see `create_attention_backend`. Raises ConfigError if the package is missing, or
        the GPU or the model does not fit."""
        super().__init__(ops)
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise ConfigError(
                "attention backend 'fa' decodes with FlashAttention 3, which runs on Hopper GPUs "
                "only; choose --attn triton, or fa,triton: FlashAttention 2 for prompts"
            )
        fits = head_dim in HEAD_DIMS if latent is None else (head_dim, latent) == LATENTS
        if dtype.itemsize != 2 or not fits:
            sizes = ", ".join(map(str, HEAD_DIMS))
            of_latents = f", and keys of {LATENTS[0]} with latents of {LATENTS[1]}"
            raise unusable(
                "fa",
                f"takes bfloat16 and float16 with head dims {sizes}{of_latents if latent else ''}; "
                f"here are {str(dtype)[6:]} and {head_dim}{f' with {latent}' if latent else ''}",
            )
        if SINKS in needs and dtype != torch.bfloat16:
            raise unusable("fa", f"takes sinks only in bfloat16; here is {str(dtype)[6:]}")
        self._paged, self._varlen = _load()
        if SINKS in needs and "sinks" not in signature(self._paged).parameters:
            raise unusable(
                "fa",
                "takes sinks only in newer versions of sglang-kernel; upgrade it",
            )

    def prepare(self, plan: Plan) -> PagedMetadata:
        metadata = super().prepare(plan)
        if metadata.old.num_rows and plan.num_tokens <= MAX_JOINED_TOKENS:
            return replace(metadata, old=metadata.all, fresh=Extent())
        return metadata

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: PoolBatch, out_DNH: Tensor) -> None:
        assert batch.rows is not None
        metadata: PagedMetadata = batch.attn_metadata
        num_rows = len(q_DNH)
        rows, table = batch.rows, batch.context.page_table
        table_BP = metadata.once("decode_table", lambda: table[rows[0, :num_rows]])
        self._run(q_DNH, layer, batch, out_DNH, table_BP, rows[3, :num_rows], None, 1)

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNH: Tensor,
    ) -> None:  # fmt: skip
        """Attend for the rows after the decode rows.

        The metadata's fresh rows, at the end of the step, have no context before it. They read k
        and v directly, which is faster than reading the cache. The old rows come before them.
        """
        assert batch.rows is not None
        metadata: PagedMetadata = batch.attn_metadata
        old, fresh = metadata.old, metadata.fresh
        first_fresh = len(q_TNH) - fresh.num_tokens
        if fresh.num_rows:
            part = slice(first_fresh, None)
            firsts = metadata.once(
                "fresh", lambda: firsts_of_last(batch.rows, fresh.num_rows, first_fresh)
            )
            qkv, more = _parts(layer, q_TNH[part], k_TKH[part], v_TKH[part])
            self._varlen(
                *qkv,
                cu_seqlens_q=firsts,
                cu_seqlens_k=firsts,
                max_seqlen_q=fresh.longest,
                max_seqlen_k=fresh.longest,
                softmax_scale=layer.scale,
                causal=True,
                window_size=_window(layer),
                out=out_TNH[part],
                **_sinks(layer),
                **more,
            )
        if old.num_rows:
            first = first_fresh - old.num_tokens
            first_row = batch.rows.shape[1] - metadata.all.num_rows
            rows = batch.rows[:, first_row : first_row + old.num_rows]
            num_pages = -(-metadata.longest // batch.context.kv_pool.page_size)
            table = batch.context.page_table[:, :num_pages]
            table_EP = metadata.once("table", lambda: table[rows[0]])
            firsts = metadata.once("firsts", lambda: firsts_of_last(rows, old.num_rows, first))
            part = slice(first, first_fresh)
            self._run(
                q_TNH[part], layer, batch, out_TNH[part], table_EP, rows[3], firsts, old.longest
            )

    def _run(
        self,
        q: Tensor,
        layer: AttnLayer,
        batch: PoolBatch,
        out: Tensor,
        table_BP: Tensor,
        ends_B: Tensor,
        firsts: Tensor | None,
        longest: int,
    ) -> None:
        pool = batch.context.kv_pool.layer(layer.layer_id)
        qkv, more = _parts(layer, q[:, None] if firsts is None else q, pool.k, pool.v)
        self._paged(
            *qkv,
            cache_seqlens=ends_B,
            page_table=table_BP,
            cu_seqlens_q=firsts,
            max_seqlen_q=longest,
            softmax_scale=layer.scale,
            causal=True,
            window_size=_window(layer),
            out=out[:, None] if firsts is None else out,
            **_sinks(layer),
            **more,
        )


def _parts(
    layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    """Return q, k and v as the kernels take them; and their argument qv, for latents."""
    size = layer.latent
    if size is None:
        return (q, k, v), {}
    return (q[..., size:], k[..., size:], v[..., :size]), {"qv": q[..., :size]}


def _window(layer: AttnLayer) -> tuple[int, int]:
    return (-1, -1) if layer.window is None else (window_left(layer), 0)


def _sinks(layer: AttnLayer) -> dict[str, Tensor]:
    return {"sinks": layer.sinks.weight.bfloat16()} if layer.sinks else {}


def _load() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions for the paged cache, and for contiguous keys and values."""
    try:
        from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    except ImportError as error:
        raise unusable("fa", f"needs the package sglang-kernel ({error})") from error
    return flash_attn_with_kvcache, flash_attn_varlen_func
