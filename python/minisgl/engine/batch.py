"""The arguments of a forward pass, from the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.attention import BaseAttnBackend
from minisgl.core import Batch, Context, PoolBatch
from minisgl.core.batch import ImageRows
from minisgl.core.groups import CacheGroup
from minisgl.engine.inputs import StepInputs

if TYPE_CHECKING:
    from minisgl.models import PoolSpec


def make_batch(
    inputs: StepInputs,
    ids_T: Tensor,
    positions: Tensor,
    pools: Sequence[PoolSpec],
    contexts: Sequence[Context],
    groups: Sequence[CacheGroup],
    images: ImageRows | None,
) -> Batch:
    """Return the arguments of a forward pass. positions: the indices of the tokens whose hidden
    states it returns. contexts: one for each of the pools."""
    rows, padded = inputs["rows"], inputs.padded
    views = []
    for pool, context in zip(pools, contexts, strict=True):
        attn: BaseAttnBackend = context.attn
        if padded and padded.num_prompts:
            attn_metadata = attn.prepare_any(
                padded.num_prompts, padded.num_prompt_tokens, padded.longest
            )
        else:
            attn_metadata = attn.prepare(inputs.plan)
        is_full = groups[pool.group].kind == "full"
        views.append(
            PoolBatch(
                positions=inputs["positions"],
                slots=inputs["slots"][pool.group],
                attn_metadata=attn_metadata,
                context=context,
                rows=rows,
                common_prefix=inputs.tensors.get("common_prefix") if is_full else None,
                key_ends=inputs.tensors.get("key_ends"),
            )
        )
    return Batch(input_ids=ids_T, sample_positions=positions, pools=tuple(views), images=images)
