"""The tensors of one step, and what a layer needs besides: arguments of `forward`, never globals.

Axes: T tokens of this step, B rows (requests), S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


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
