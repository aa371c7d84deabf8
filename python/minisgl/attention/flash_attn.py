"""FlashAttention 3 (Shah et al. 2024) over the paged cache, on Hopper.

The kernels come from the package `sglang-kernel` (module `sgl_kernel`), which is built for several
versions of torch.

Axes: as in `minisgl.attention.paged`; B rows, E of them extend, P pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer
from minisgl.attention.paged import PagedAttnBackend, PagedMetadata
from minisgl.core import Batch
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops


class FlashAttentionBackend(PagedAttnBackend):
    name = "fa"

    def __init__(self, ops: Ops, device: torch.device) -> None:
        """Raises ConfigError where the package or the GPU does not do."""
        super().__init__(ops)
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise ConfigError(
                "attention backend 'fa' is FlashAttention 3, which runs on Hopper GPUs only; "
                "choose --attn triton"
            )
        self._attend = _load()

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: Batch, out_DNH: Tensor) -> None:
        assert batch.rows is not None
        metadata: PagedMetadata = batch.attn_metadata
        num_rows = len(q_DNH)
        rows, table = batch.rows, batch.context.page_table
        table_BP = metadata.once("decode_table", lambda: table[rows[0, :num_rows]])
        self._run(q_DNH, layer, batch, out_DNH, table_BP, rows[3, :num_rows], None, 1)

    def extend(self, q_TNH: Tensor, layer: AttnLayer, batch: Batch, out_TNH: Tensor) -> None:
        assert batch.rows is not None
        metadata: PagedMetadata = batch.attn_metadata
        first_row = batch.rows.shape[1] - len(metadata.lengths)
        first = len(q_TNH) - sum(metadata.lengths)
        rows, table = batch.rows[:, first_row:], batch.context.page_table
        page_size = batch.context.kv_pool.page_size
        num_pages = -(-metadata.longest // page_size)
        table_EP = metadata.once("table", lambda: table[:, :num_pages][rows[0]])
        firsts = metadata.once(
            "firsts", lambda: torch.cat((rows[1], rows[1, -1:] + rows[2, -1:])) - first
        )
        longest = max(metadata.lengths)
        self._run(q_TNH[first:], layer, batch, out_TNH[first:], table_EP, rows[3], firsts, longest)

    def _run(
        self,
        q: Tensor,
        layer: AttnLayer,
        batch: Batch,
        out: Tensor,
        table_BP: Tensor,
        ends_B: Tensor,
        firsts: Tensor | None,
        longest: int,
    ) -> None:
        pool = batch.context.kv_pool.layer(layer.layer_id)
        window = (-1, -1) if layer.window is None else (layer.window - 1, 0)
        self._attend(
            q[:, None] if firsts is None else q,
            pool.k,
            pool.v,
            cache_seqlens=ends_B,
            page_table=table_BP,
            cu_seqlens_q=firsts,
            max_seqlen_q=longest,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window,
            out=out[:, None] if firsts is None else out,
        )


def _load() -> Callable[..., Any]:
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        raise ConfigError(
            f"attention backend 'fa' needs the package sglang-kernel: {error}; install it, or "
            "choose --attn triton"
        ) from error
    attend: Callable[..., Any] = flash_attn_with_kvcache
    return attend
