"""The arguments of `forward`: the tensors of one step, and the objects that all steps share.

Axes: T tokens of this step, B rows (requests), S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The objects that all steps share, for the layers of one pool.

    kv_pool: a `minisgl.kvcache.pool.BaseKVCachePool`. page_table: int32 [R, P], the page ids of
    each row of the request tables, in the pool's cache group. attn: a
    `minisgl.attention.BaseAttnBackend`. (The types are `Any` because core must not import these.)
    """

    kv_pool: Any
    page_table: Tensor
    attn: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBatch:
    """The step as the layers of one pool see it.

    positions: int32 [T]. slots: int32 [T], the token slot (page * page_size + offset) where each
    token's KV goes; -1 stores nothing. attn_metadata: the result of the attention backend's
    `prepare`. rows: int32 [4, B], each row's table index, first token in the batch, number of
    tokens, and end of its context; for backends that read them on the device. common_prefix: int32
    [1], the number of tokens of the common prefix that all decode rows have in the same pages; None
    without one. key_ends: int32 [T], where the keys of each token end in a layer that is `two_way`;
    None if they end with the token itself.
    """

    positions: Tensor
    slots: Tensor
    attn_metadata: Any
    context: Context
    rows: Tensor | None = None
    common_prefix: Tensor | None = None
    key_ends: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """Rows of images, which replace embeddings.

    tokens: int64 [N], their indices in the step. rows: [N, D]; None on a rank whose partial sum is
    zero there. deep: [N, D] for each of the first blocks, whose output they are added to.
    """

    tokens: Tensor
    rows: Tensor | None
    deep: tuple[Tensor, ...] = ()

    def put(self, x_TD: Tensor) -> Tensor:
        """Write the rows into the embeddings of the step, in place."""
        x_TD[self.tokens] = 0 if self.rows is None else self.rows.to(x_TD.dtype)
        return x_TD


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's inputs on the device.

    input_ids: int32 [T]. sample_positions: int64 [S], the indices of the tokens that yield logits.
    pools: one view of the step for each pool of the model (`minisgl.models.spec.CacheLayout`).
    images: of the step's prompts; None without any.
    """

    input_ids: Tensor
    sample_positions: Tensor
    pools: tuple[PoolBatch, ...]
    images: ImageRows | None = None
