"""The base of the GPU backends: they norm, rotate and store, then attend.

A backend implements `decode` (rows with one query) and `extend` (rows with a chunk of a prompt).
`HybridBackend` takes each from another backend.

Axes: T tokens of this step, D of them decode, N query heads, K key/value heads, H head dim, V dims
of a value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.attention.base import AttnLayer, BaseAttnBackend, BaseAttnMetadata, QKVSteps
from minisgl.core import Plan, PoolBatch
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops

SHORT_CONTEXT = 1024
"""Tokens. A captured decode step of few rows is one for contexts up to this length, or one for any,
where a backend has other kernels for them (`BaseAttnBackend.short_rows`)."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of consecutive rows: their number, all their tokens, and those of the longest."""

    num_rows: int = 0
    num_tokens: int = 0
    longest: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Extent:
        return cls(len(lengths), sum(lengths), max(lengths, default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedMetadata(BaseAttnMetadata):
    """The sizes of the rows after the decode rows, which kernels need at the launch.

    old: rows with tokens before this step. They come first. fresh: rows that begin at position 0.
    longest: the end of the longest context. is_short: no decode row has more than SHORT_CONTEXT
    tokens. is_padded: the sizes are upper bounds (see `prepare_any`). has_drafts: several decode
    rows may be of one request, so all keys and values must be stored before a row attends.
    """

    old: Extent
    fresh: Extent
    longest: int
    is_short: bool = False
    is_padded: bool = False
    has_drafts: bool = False

    @property
    def all(self) -> Extent:
        old, fresh = self.old, self.fresh
        return Extent(
            old.num_rows + fresh.num_rows,
            old.num_tokens + fresh.num_tokens,
            max(old.longest, fresh.longest),
        )

    def zeros(self, like: Tensor) -> Tensor:
        """Return zeros in this shape, the same tensor for all layers.

        Layers write only the tokens that belong to rows, so the others stay zero.
        """
        zeros: Tensor = self.once("zeros", lambda: torch.zeros_like(like))
        return zeros


def sizes_of(plan: Plan) -> dict[str, Any]:
    """Return the fields of `PagedMetadata` for a step."""
    starts, ends = plan.starts[plan.num_decodes :], plan.ends[plan.num_decodes :]
    num_fresh = next((i for i, start in enumerate(reversed(starts)) if start), len(starts))
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    num_old = len(lengths) - num_fresh
    return {
        "old": Extent.of(lengths[:num_old]),
        "fresh": Extent.of(lengths[num_old:]),
        "longest": max(ends, default=0),
        "is_short": max(plan.ends[: plan.num_decodes], default=0) <= SHORT_CONTEXT,
        "has_drafts": plan.num_drafts > 0,
    }


class PagedAttnBackend(BaseAttnBackend):
    graph_safe = True

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self._norm_rope_store = plugins.find("ops", "norm_rope_store")
        self.takes_queries = self._norm_rope_store is not None

    @abstractmethod
    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: PoolBatch, out_DNV: Tensor) -> None:
        """Attend for the first D rows of the batch, with one query each. A graph can capture it."""

    @abstractmethod
    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNV: Tensor,
    ) -> None:  # fmt: skip
        """Attend for the rows after the decode rows. The tensors are those of the whole step."""

    def prepare(self, plan: Plan) -> PagedMetadata:
        return PagedMetadata(**sizes_of(plan))

    def prepare_any(self, num_rows: int, num_tokens: int, longest: int) -> PagedMetadata:
        any_rows = Extent(num_rows, num_tokens, longest=num_tokens)
        return PagedMetadata(old=any_rows, fresh=Extent(), longest=longest, is_padded=True)

    def decode_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor | None:
        """Do `forward_qkv` for a step that has only decode rows, each of another request. Returns
        None if there is no kernel for it."""
        return None

    def forward_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor:
        metadata: PagedMetadata = batch.attn_metadata
        layer = steps.layer
        has_kv = qkv.shape[1] > layer.num_q_heads * layer.head_dim
        if has_kv and not metadata.all.num_rows and not metadata.has_drafts:
            out = self.decode_qkv(qkv, steps, batch)
            if out is not None:
                return out
        if self._norm_rope_store is None:
            return super().forward_qkv(qkv, steps, batch)
        pool = batch.context.kv_pool.layer(layer.layer_id)
        q_TNH, k_TKH, v_TKH = self._norm_rope_store(
            qkv,
            pool,
            batch.slots,
            batch.positions,
            steps.cos_sin,
            steps.q_norm_weight,
            steps.k_norm_weight,
            steps.norm_eps,
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads if has_kv else 0,
            head_dim=layer.head_dim,
            keep=metadata.fresh.num_rows > 0,
            norms_values=steps.norms_values,
        )
        return self.attend(q_TNH, k_TKH, v_TKH, layer, batch).flatten(1)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        pool = batch.context.kv_pool.layer(layer.layer_id)
        self.ops.store_kv(k_TKH, v_TKH, batch.slots, pool)
        return self.attend(q_TNH.contiguous(), k_TKH, v_TKH, layer, batch)

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        """Attend for all rows; k and v of the step are stored already. Returns [T, N, V]."""
        assert batch.rows is not None
        metadata: PagedMetadata = batch.attn_metadata
        num_extending = metadata.all.num_rows
        # Padding rows that have no keys are not computed, for example those with a common prefix.
        has_gaps = metadata.is_padded or batch.common_prefix is not None
        like = q_TNH[..., : layer.latent]
        out_TNV = metadata.zeros(like) if has_gaps else torch.empty_like(like)
        num_decodes = batch.rows.shape[1] - num_extending
        if num_decodes:
            self.decode(q_TNH[:num_decodes], layer, batch, out_TNV[:num_decodes])
        if num_extending:
            self.extend(q_TNH, k_TKH, v_TKH, layer, batch, out_TNV)
        return out_TNV


class HybridBackend(PagedAttnBackend):
    """One backend for prompts and another one for decode rows: `--attn prefill,decode`."""

    def __init__(self, ops: Ops, prefill: PagedAttnBackend, decode: PagedAttnBackend) -> None:
        super().__init__(ops)
        self.name = f"{prefill.name},{decode.name}"
        self.prompts_graph_safe = prefill.prompts_graph_safe
        self.reads_window_only = prefill.reads_window_only and decode.reads_window_only
        self.takes_two_way = prefill.takes_two_way or decode.takes_two_way
        self.short_rows = decode.short_rows
        self._prefill, self._decode = prefill, decode

    def prepare(self, plan: Plan) -> PagedMetadata:
        return self._prefill.prepare(plan)

    def prepare_any(self, num_rows: int, num_tokens: int, longest: int) -> PagedMetadata:
        return self._prefill.prepare_any(num_rows, num_tokens, longest)

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: PoolBatch, out_DNV: Tensor) -> None:
        self._decode.decode(q_DNH, layer, batch, out_DNV)

    def decode_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor | None:
        return self._decode.decode_qkv(qkv, steps, batch)

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNV: Tensor,
    ) -> None:  # fmt: skip
        is_two_way = layer.two_way and batch.key_ends is not None
        backend = self._decode if is_two_way and self._decode.takes_two_way else self._prefill
        backend.extend(q_TNH, k_TKH, v_TKH, layer, batch, out_TNV)


def window_left(layer: AttnLayer) -> int:
    """Return the number of keys before its own that a query sees; -1 for all. FlashAttention and
    FlashInfer take windows so."""
    return -1 if layer.window is None else layer.window - 1


def unusable(name: str, why: str) -> ConfigError:
    """Return the error for a backend that does not work here. why: continues its name."""
    return ConfigError(f"attention backend {name!r} {why}; choose --attn triton")


def firsts_of_last(rows: Tensor | None, count: int, first: int) -> Tensor:
    """Return where each of the last `count` rows begins, and where the last one ends: int32
    [count + 1], counted from token `first`.

    rows: `PoolBatch.rows`, or some of its columns.
    """
    assert rows is not None
    begins, lengths = rows[1, -count:], rows[2, -count:]
    return torch.cat((begins, begins[-1:] + lengths[-1:])) - first
