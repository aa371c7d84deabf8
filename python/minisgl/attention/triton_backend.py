"""Paged attention in Triton: flash-decoding with KV splits for decode rows, extend for the others.

It needs no package beside torch, and supports any head dim, page size, grouping and window. See
`minisgl.kernel.triton.decode_attention`, `kv_split` and `extend_attention`.

Axes: as in `minisgl.attention.paged`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer, QKVSteps
from minisgl.attention.paged import PagedAttnBackend, PagedMetadata
from minisgl.core import PoolBatch
from minisgl.kernel.ops import Ops
from minisgl.kernel.triton.decode_attention import Rotation, decode
from minisgl.kernel.triton.decode_config import FEW_BELOW
from minisgl.kernel.triton.extend_attention import extend
from minisgl.kernel.triton.kv_split import split_contexts
from minisgl.kernel.triton.launch import power_of_2


class TritonAttnBackend(PagedAttnBackend):
    name = "triton"
    prompts_graph_safe = True
    reads_window_only = True
    takes_two_way = True

    def __init__(self, ops: Ops, num_cores: int, device: torch.device) -> None:
        """num_cores: the device's multiprocessors."""
        super().__init__(ops)
        self.num_cores = num_cores
        self._done_of_few = torch.zeros(FEW_BELOW, dtype=torch.int32, device=device)

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: PoolBatch, out_DNV: Tensor) -> None:
        self._decode(q_DNH, layer, batch, out_DNV, None)

    def takes_qkv(self, steps: QKVSteps, batch: PoolBatch) -> bool:
        """Return whether `decode_qkv` has a kernel for the layer."""
        head_dim = steps.layer.head_dim
        whole = head_dim == steps.cos_sin.shape[1] == power_of_2(head_dim)
        has_common_prefix = batch.common_prefix is not None and steps.layer.window is None
        return whole and steps.by_place and head_dim >= 16 and not has_common_prefix

    def decode_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor | None:
        if not self.takes_qkv(steps, batch):
            return None
        layer = steps.layer
        rotation = Rotation(
            qkv=qkv,
            slots=batch.slots,
            cos_sin=steps.cos_sin,
            q_weight=steps.q_norm_weight,
            k_weight=steps.k_norm_weight,
            eps=steps.norm_eps,
            norms_values=steps.norms_values,
        )
        shape = (len(qkv), layer.num_q_heads, layer.head_dim)
        out_BNH = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        self._decode(out_BNH, layer, batch, out_BNH, rotation)
        return out_BNH.flatten(1)

    def _decode(
        self,
        q_DNH: Tensor,
        layer: AttnLayer,
        batch: PoolBatch,
        out_DNV: Tensor,
        rotation: Rotation | None,
    ) -> None:
        assert batch.rows is not None
        rows, window = batch.rows, layer.window
        pool = batch.context.kv_pool.layer(layer.layer_id)
        common_prefix = None if window else batch.common_prefix
        metadata: PagedMetadata = batch.attn_metadata
        splits = metadata.once(
            f"splits, window {window}",
            lambda: split_contexts(
                rows,
                q_DNH.shape,
                q_DNH.dtype,
                kv_dtype=pool.k.dtype,
                num_kv_heads=layer.num_kv_heads,
                value_dim=out_DNV.shape[2],
                window=window,
                common_prefix=common_prefix,
                rotates=rotation is not None,
                num_cores=self.num_cores,
                done_of_few=self._done_of_few,
            ),
        )
        decode(
            q_DNH,
            pool,
            batch.context.page_table,
            rows,
            splits,
            scale=layer.scale,
            window=window,
            softcap=layer.softcap,
            sinks=layer.sinks.weight if layer.sinks else None,
            common_prefix=common_prefix,
            rotation=rotation,
            out_BNV=out_DNV,
        )

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNV: Tensor,
    ) -> None:  # fmt: skip
        assert batch.rows is not None
        pool = batch.context.kv_pool.layer(layer.layer_id)
        extent = batch.attn_metadata.all
        table = batch.context.page_table
        rows = batch.rows[:, batch.rows.shape[1] - extent.num_rows :]
        extend(
            q_TNH,
            pool,
            table,
            rows,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            sinks=layer.sinks.weight if layer.sinks else None,
            longest=extent.longest,
            num_tokens=extent.num_tokens,
            key_ends=batch.key_ends if layer.two_way else None,
            out_TNV=out_TNV,
        )
