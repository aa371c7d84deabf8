"""The tensors of one step, and what a layer needs besides: arguments of `forward`, never globals.

Axes: T tokens of this step, B rows (requests), S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSamplingArgs:
    """Per sampling row, on the device; None where no row of the step needs it.

    temperatures: float32 [S], 0 is greedy. top_ks: int32 [S], 0 is all. top_ps, min_ps:
    float32 [S]. seeds: int64 [S] (the 64 bits of the seed). output_idxs: int64 [S].
    `all_greedy` lets a step of greedy rows skip everything else.
    """

    all_greedy: bool
    temperatures: Tensor | None = None
    top_ks: Tensor | None = None
    top_ps: Tensor | None = None
    min_ps: Tensor | None = None
    seeds: Tensor | None = None
    output_idxs: Tensor | None = None

    def take(self, rows: range) -> BatchSamplingArgs:
        """Those of consecutive rows, as views."""

        def part(x_S: Tensor | None) -> Tensor | None:
            return None if x_S is None else x_S[rows.start : rows.stop]

        return BatchSamplingArgs(
            all_greedy=self.all_greedy,
            temperatures=part(self.temperatures),
            top_ks=part(self.top_ks),
            top_ps=part(self.top_ps),
            min_ps=part(self.min_ps),
            seeds=part(self.seeds),
            output_idxs=part(self.output_idxs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What stays the same from step to step: given to layers with each batch.

    kv_pool: a `minisgl.kvcache.BaseKVCachePool`. page_table: int32 [R, P], page ids of request
    table rows. attn: a `minisgl.attention.BaseAttnBackend`. (Typed loosely: core is below them.)
    """

    kv_pool: Any
    page_table: Tensor
    attn: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's inputs on the device.

    input_ids: int32 [T]. positions: int32 [T]. slots: int32 [T], the token slot
    (page * page_size + offset) where each token's KV goes; -1 is padding.
    sample_positions: int64 [S], which of the T tokens yield logits.
    attn_metadata: what the attention backend's `prepare` made of the plan.
    rows: int32 [4, B], each row's table index, first of the T tokens, number of tokens, and end
    of its context; for backends that read them on the device. shared: int32 [1], at how many
    tokens the decode rows' contexts part: those before lie in the same pages; None for none.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    sample_positions: Tensor
    attn_metadata: Any
    context: Context
    rows: Tensor | None = None
    shared: Tensor | None = None
