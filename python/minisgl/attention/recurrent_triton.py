"""Recurrent layers in Triton: the convolution, then decode rows and prompts, with separate kernels.

Decode rows read everything that changes between steps from device memory, so their steps can be
captured.

Axes: T tokens of this step, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnMetadata
from minisgl.attention.recurrent import DeltaLayer, RecurrentBackend, StateSpace
from minisgl.core import Plan, PoolBatch
from minisgl.kernel.triton.delta_conv import convolve
from minisgl.kernel.triton.delta_decode import decode
from minisgl.kernel.triton.delta_extend import extend
from minisgl.kvcache.recurrent import RecurrentPool


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonRecurrentMetadata(BaseAttnMetadata):
    """num_prompts, num_prompt_tokens: the number of rows after the decode rows, and of their
    tokens. owners: the row of each token, int32 [T]; the first layer computes it."""

    num_prompts: int
    num_prompt_tokens: int
    owners: list[Tensor] = field(default_factory=list)


class TritonRecurrentBackend(RecurrentBackend):
    name = "triton"
    graph_safe = True

    def prepare(self, plan: Plan) -> TritonRecurrentMetadata:
        return TritonRecurrentMetadata(
            num_prompts=plan.num_rows - plan.num_decodes,
            num_prompt_tokens=plan.num_tokens - plan.num_decodes,
        )

    def forward(
        self,
        x_TD: Tensor,
        g_TN: Tensor,
        beta_TN: Tensor,
        weight_WD: Tensor,
        layer: DeltaLayer,
        batch: PoolBatch,
        space: StateSpace | None = None,
    ) -> Tensor:
        rows = batch.rows
        assert rows is not None
        metadata: TritonRecurrentMetadata = batch.attn_metadata
        if not metadata.owners:
            metadata.owners.append(self._owners(rows, len(x_TD), metadata))
        pool: RecurrentPool = batch.context.kv_pool
        cache, row_table = pool.layer(layer.layer_id), batch.context.page_table
        mixed_TD = convolve(
            x_TD, weight_WD, space.bias_D if space else None, cache.tails, cache.inputs,
            batch.slots, metadata.owners[0], rows, row_table, self.state_table,
            num_prompts=metadata.num_prompts, interval=layer.interval, page_size=self.page_size,
        )  # fmt: skip
        out_TNV = torch.empty(
            (len(x_TD), layer.num_heads, layer.value_dim), dtype=x_TD.dtype, device=x_TD.device
        )
        num_decodes = rows.shape[1] - metadata.num_prompts
        tensors = (
            mixed_TD, g_TN, beta_TN, cache.states, cache.keys, cache.updates, cache.decays,
            batch.slots,
        )  # fmt: skip
        tables = (row_table, self.state_table, out_TNV, space.skip_N if space else None)
        if num_decodes:
            decode(
                *tensors, rows, *tables,
                num_rows=num_decodes, interval=layer.interval, page_size=self.page_size,
            )  # fmt: skip
        if metadata.num_prompts:
            extend(
                *tensors, rows[:, num_decodes:], *tables, num_tokens=metadata.num_prompt_tokens,
                interval=layer.interval, page_size=self.page_size,
            )  # fmt: skip
        return out_TNV

    def _owners(self, rows: Tensor, num_tokens: int, metadata: TritonRecurrentMetadata) -> Tensor:
        numbers = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
        if not metadata.num_prompts:
            return numbers
        return torch.repeat_interleave(numbers, rows[2], output_size=num_tokens)
