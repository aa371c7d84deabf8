"""What the GPU's backends share: norm, rotate and store first, then decode rows and the others.

A backend has two halves, `decode` (one query a row) and `extend` (prompts and chunks); the hybrid
takes each from another backend.

Axes: T tokens of this step, D of them decode, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer, BaseAttnBackend, BaseAttnMetadata, QKVSteps
from minisgl.core import Batch, Plan
from minisgl.kernel.ops import Ops
from minisgl.kernel.triton import rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedMetadata(BaseAttnMetadata):
    """Of the rows after the decode rows; what is known on the device is in `Batch.rows`.

    lengths: tokens of each. num_fresh: how many at the end begin at position 0. longest: the end
    of the longest context. memo: what the first layer derives and the others use.
    """

    lengths: list[int]
    num_fresh: int
    longest: int
    memo: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]


class PagedAttnBackend(BaseAttnBackend):
    graph_safe = True

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    @abstractmethod
    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: Batch, out_DNH: Tensor) -> None:
        """Attend for the batch's first D rows, of one query each. Safe to capture in a graph."""

    @abstractmethod
    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: Batch,
        out_TNH: Tensor,
    ) -> None:  # fmt: skip
        """Attend for the rows of `batch.attn_metadata`; the tensors are those of the whole step."""

    def prepare(self, plan: Plan) -> PagedMetadata:
        starts, ends = plan.starts[plan.num_decodes :], plan.ends[plan.num_decodes :]
        num_fresh = next((i for i, start in enumerate(reversed(starts)) if start), len(starts))
        return PagedMetadata(
            num_fresh=num_fresh,
            lengths=[end - start for start, end in zip(starts, ends, strict=True)],
            longest=max(ends, default=0),
        )

    def decode_qkv(self, qkv: Tensor, steps: QKVSteps, batch: Batch) -> Tensor | None:
        """`forward_qkv` of a step of decode rows alone; None where there is no kernel for it."""
        return None

    def forward_qkv(self, qkv: Tensor, steps: QKVSteps, batch: Batch) -> Tensor:
        if not batch.attn_metadata.lengths:
            out = self.decode_qkv(qkv, steps, batch)
            if out is not None:
                return out
        layer = steps.layer
        pool = batch.context.kv_pool.layer(layer.layer_id)
        q_TNH, k_TKH, v_TKH = rotary.norm_rope_store(
            qkv,
            pool.k,
            pool.v,
            batch.slots,
            batch.positions,
            steps.cos_sin,
            steps.q_norm_weight,
            steps.k_norm_weight,
            steps.norm_eps,
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            keep=batch.attn_metadata.num_fresh > 0,
        )
        return self.attend(q_TNH, k_TKH, v_TKH, layer, batch).flatten(1)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: Batch
    ) -> Tensor:
        pool = batch.context.kv_pool.layer(layer.layer_id)
        self.ops.store_kv(k_TKH, v_TKH, batch.slots, pool)
        return self.attend(q_TNH.contiguous(), k_TKH, v_TKH, layer, batch)

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: Batch
    ) -> Tensor:
        """[T, N, H]; this step's k and v are stored already."""
        assert batch.rows is not None
        lengths = batch.attn_metadata.lengths
        out_TNH = torch.empty_like(q_TNH)
        num_decodes = batch.rows.shape[1] - len(lengths)
        if num_decodes:
            self.decode(q_TNH[:num_decodes], layer, batch, out_TNH[:num_decodes])
        if lengths:
            self.extend(q_TNH, k_TKH, v_TKH, layer, batch, out_TNH)
        return out_TNH


class HybridBackend(PagedAttnBackend):
    """Prompts and chunks by one backend, decode by another: `--attn prefill,decode`."""

    def __init__(self, ops: Ops, prefill: PagedAttnBackend, decode: PagedAttnBackend) -> None:
        super().__init__(ops)
        self.name = f"{prefill.name},{decode.name}"
        self._prefill, self._decode = prefill, decode

    def prepare(self, plan: Plan) -> PagedMetadata:
        return self._prefill.prepare(plan)

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: Batch, out_DNH: Tensor) -> None:
        self._decode.decode(q_DNH, layer, batch, out_DNH)

    def decode_qkv(self, qkv: Tensor, steps: QKVSteps, batch: Batch) -> Tensor | None:
        return self._decode.decode_qkv(qkv, steps, batch)

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: Batch,
        out_TNH: Tensor,
    ) -> None:  # fmt: skip
        self._prefill.extend(q_TNH, k_TKH, v_TKH, layer, batch, out_TNH)
