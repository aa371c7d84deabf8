"""The Triton attention backend with our kernels on Hopper: of few decode rows, and of prompts of
heads of 512 dims.

Axes: as in `minisgl.attention.paged`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer, QKVSteps
from minisgl.attention.paged import PagedMetadata
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.core import PoolBatch
from minisgl.kernel.ops import Ops
from minisgl_kernels.few_attention import FewAttention
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.wide_attention import WideAttention


class HopperTritonBackend(TritonAttnBackend):
    """`TritonAttnBackend`, but `FewAttention` and `WideAttention` compute what they take."""

    short_rows = 8

    def __init__(
        self,
        ops: Ops,
        num_cores: int,
        device: torch.device,
        few: FewAttention,
        wide: WideAttention,
    ) -> None:
        super().__init__(ops, num_cores, device)
        self._few, self._wide = few, wide

    def decode_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor | None:
        layer = steps.layer
        pool = batch.context.kv_pool.layer(layer.layer_id)
        metadata: PagedMetadata = batch.attn_metadata
        if not self.takes_qkv(steps, batch) or not self._few.takes(
            qkv, steps, pool, is_short=metadata.is_short
        ):
            return super().decode_qkv(qkv, steps, batch)
        assert batch.rows is not None
        shape = (len(qkv), layer.num_q_heads, layer.head_dim)
        out_BNH = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        table = batch.context.page_table
        self._few.decode(qkv, steps, pool, table, batch.rows, batch.slots, out_BNH)
        return out_BNH.flatten(1)

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNV: Tensor,
    ) -> None:  # fmt: skip
        pool = batch.context.kv_pool.layer(layer.layer_id)
        is_special = layer.window or layer.softcap or layer.sinks or layer.two_way
        if is_special or not self._wide.takes(q_TNH, pool, out_TNV):
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
    """Return the Triton backend on the current GPU, with what Hopper has beside it."""
    kernels = on_hopper(
        lambda: (FewAttention(), WideAttention()),
        "Triton's kernels compute few decode rows, and prompts of wide heads",
    )
    if kernels is None:
        return TritonAttnBackend(ops, num_cores, device)
    return HopperTritonBackend(ops, num_cores, device, *kernels)
