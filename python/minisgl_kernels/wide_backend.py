"""The Triton attention backend with our kernel on Hopper for prompts of heads of 512 dims.

Axes: as in `minisgl.attention.paged`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.core import PoolBatch
from minisgl.kernel.ops import Ops
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.wide_attention import WideAttention


class WideTritonBackend(TritonAttnBackend):
    """`TritonAttnBackend`, but `WideAttention` computes the prompts that it takes."""

    def __init__(self, ops: Ops, num_cores: int, device: torch.device, wide: WideAttention) -> None:
        super().__init__(ops, num_cores, device)
        self._wide = wide

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNV: Tensor,
    ) -> None:  # fmt: skip
        pool = batch.context.kv_pool.layer(layer.layer_id)
        is_bounded = layer.window or layer.softcap or layer.sinks
        if is_bounded or not self._wide.takes(q_TNH, pool, out_TNV):
            super().extend(q_TNH, k_TKH, v_TKH, layer, batch, out_TNV)
            return
        assert batch.rows is not None
        extent = batch.attn_metadata.all
        rows = batch.rows[:, batch.rows.shape[1] - extent.num_rows :]
        self._wide.extend(
            q_TNH, pool, batch.context.page_table, rows, scale=layer.scale,
            num_tokens=extent.num_tokens, out_TNH=out_TNV,
        )  # fmt: skip


def create_backend(ops: Ops, num_cores: int, device: torch.device) -> TritonAttnBackend:
    """Return the Triton backend for heads of 512 dims on the current GPU."""
    wide = on_hopper(WideAttention, "Triton's kernel computes prompts of wide heads")
    if wide is None:
        return TritonAttnBackend(ops, num_cores, device)
    return WideTritonBackend(ops, num_cores, device, wide)
