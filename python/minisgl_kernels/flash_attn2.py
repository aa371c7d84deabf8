"""FlashAttention 2 (Dao 2023) as torch ships it, for prompts and chunks only.

It runs on every GPU since Ampere and needs no other package. It reads contiguous keys and values.
The keys and values of a prompt that begins are contiguous. The contexts of other rows are gathered
from the pages, some rows at a time. So each layer copies these contexts, which takes little time
compared with attending to them.

Axes: as in `minisgl.attention.paged`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer
from minisgl.attention.paged import (
    Extent,
    PagedAttnBackend,
    PagedMetadata,
    firsts_of_last,
    sizes_of,
    unusable,
    window_left,
)
from minisgl.core import Plan, PoolBatch
from minisgl.kernel.ops import Ops
from minisgl_kernels.contexts import context_slots, split_rows

MAX_HEAD_DIM = 256
MIN_ARCH = (8, 0)
GATHERED_TOKENS = 16_384
"""The most tokens of contexts that are gathered at a time, unless one context is longer: 64 MiB for
8 heads of 128 dims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Consecutive rows whose contexts are gathered together.

    first_row, first_token: indices in the step. new: the size of what the rows compute in this
    step. contexts: the size of their contexts.
    """

    first_row: int
    first_token: int
    new: Extent
    contexts: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention2Metadata(PagedMetadata):
    """groups: the old rows, in groups."""

    groups: list[Group]


class FlashAttention2Backend(PagedAttnBackend):
    name = "fa2"

    def __init__(self, ops: Ops, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Raises ConfigError if torch, the GPU or the model does not fit."""
        super().__init__(ops)
        if torch.cuda.get_device_capability(device) < MIN_ARCH:
            raise unusable("fa2", "needs an Ampere GPU or later")
        if not torch.backends.cuda.is_flash_attention_available():
            raise unusable("fa2", "is torch's FlashAttention, without which this torch was built")
        if dtype.itemsize != 2 or head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise unusable(
                "fa2",
                "takes bfloat16 and float16 and head dims that are multiples of 8, up to "
                f"{MAX_HEAD_DIM}; here are {str(dtype)[6:]} and {head_dim}",
            )
        self._varlen = _load()

    def prepare(self, plan: Plan) -> FlashAttention2Metadata:
        sizes = sizes_of(plan)
        rows = slice(plan.num_decodes, plan.num_decodes + sizes["old"].num_rows)
        starts, ends = plan.starts[rows], plan.ends[rows]
        groups: list[Group] = []
        first_token = plan.num_decodes  # one of each decode row
        for run in split_rows(ends, GATHERED_TOKENS):
            lengths = [end - start for start, end in zip(starts[run], ends[run], strict=True)]
            groups.append(
                Group(
                    first_row=plan.num_decodes + run.start,
                    first_token=first_token,
                    new=Extent.of(lengths),
                    contexts=Extent.of(ends[run]),
                )
            )
            first_token += sum(lengths)
        return FlashAttention2Metadata(**sizes, groups=groups)

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: PoolBatch, out_DNH: Tensor) -> None:
        raise AssertionError("fa2 is only ever the first half of a HybridBackend")

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNH: Tensor,
    ) -> None:  # fmt: skip
        metadata: FlashAttention2Metadata = batch.attn_metadata
        window = (window_left(layer), 0)  # causal
        attend = partial(self._varlen, scale=layer.scale, window_size=window)
        pool = batch.context.kv_pool.layer(layer.layer_id)
        gathered = metadata.once(
            "gathered", lambda: [_gathered(group, batch) for group in metadata.groups]
        )
        for group, (slots, first_keys, firsts) in zip(metadata.groups, gathered, strict=True):
            part = slice(group.first_token, group.first_token + group.new.num_tokens)
            k, v = (x.flatten(0, 1).index_select(0, slots) for x in (pool.k, pool.v))
            longest, longest_context = group.new.longest, group.contexts.longest
            out_TNH[part] = attend(q_TNH[part], k, v, firsts, first_keys, longest, longest_context)
        fresh = metadata.fresh
        if fresh.num_rows:
            first = len(q_TNH) - fresh.num_tokens
            part, longest = slice(first, None), fresh.longest
            firsts = metadata.once(
                "fresh", lambda: firsts_of_last(batch.rows, fresh.num_rows, first)
            )
            out_TNH[part] = attend(
                q_TNH[part], k_TKH[part], v_TKH[part], firsts, firsts, longest, longest
            )


def _gathered(group: Group, batch: PoolBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slots of a group's contexts, int64 [C], where each row begins among them, and
    where each row begins among the group's tokens, both int32 [E + 1]: see `context_slots`,
    `firsts_of_last`."""
    assert batch.rows is not None
    rows = batch.rows[:, group.first_row : group.first_row + group.new.num_rows]
    table, page_size = batch.context.page_table, batch.context.kv_pool.page_size
    slots, first_keys = context_slots(table, rows[0], rows[3], group.contexts.num_tokens, page_size)
    return slots, first_keys, firsts_of_last(rows, group.new.num_rows, group.first_token)


def _load() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    # Since 2.12 torch needs a flag for grouped queries (GQA). Before, there was no flag.
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if has_flag else varlen_attn
