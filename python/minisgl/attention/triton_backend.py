"""Paged attention in Triton: decode rows by split-KV flash-decode, the others by extend.

Needs nothing but torch. Any head dim, page size, grouping and window; see
`minisgl.kernel.triton.attention`.

Axes: as in `minisgl.attention.paged`.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.attention.base import AttnLayer
from minisgl.attention.paged import PagedAttnBackend
from minisgl.core import Batch
from minisgl.kernel.ops import Ops
from minisgl.kernel.triton import attention


class TritonAttnBackend(PagedAttnBackend):
    name = "triton"

    def __init__(self, ops: Ops, num_cores: int) -> None:
        """num_cores: the device's multiprocessors."""
        super().__init__(ops)
        self.num_cores = num_cores

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: Batch, out_DNH: Tensor) -> None:
        assert batch.rows is not None
        pool = batch.context.kv_pool.layer(layer.layer_id)
        attention.decode(
            q_DNH,
            pool.k,
            pool.v,
            batch.context.page_table,
            batch.rows,
            scale=layer.scale,
            window=layer.window,
            pieces=attention.num_pieces(len(q_DNH), layer.num_kv_heads, self.num_cores),
            shared_1=None if layer.window else batch.shared,
            out_BNH=out_DNH,
        )

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: Batch,
        out_TNH: Tensor,
    ) -> None:  # fmt: skip
        assert batch.rows is not None
        pool = batch.context.kv_pool.layer(layer.layer_id)
        lengths = batch.attn_metadata.lengths
        attention.extend(
            q_TNH,
            pool.k,
            pool.v,
            batch.context.page_table,
            batch.rows[:, batch.rows.shape[1] - len(lengths) :],
            scale=layer.scale,
            window=layer.window,
            lengths=lengths,
            out_TNH=out_TNH,
        )
