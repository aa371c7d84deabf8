"""Recurrent layers in Triton: the convolution, then decode rows and prompts, with separate kernels;
those of delta nets are in CUDA C++ on Hopper. A twin of `minisgl_zoo.recurrent.backend`.

Decode rows read everything that changes between steps from device memory, so their steps can be
captured.

Axes: T tokens of this step, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnMetadata
from minisgl.core import Plan, PoolBatch
from minisgl_kernels.delta_decode import DeltaDecode
from minisgl_kernels.delta_hopper import DeltaPrompts
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.triton.delta_conv import convolve
from minisgl_kernels.triton.delta_decode import decode
from minisgl_kernels.triton.delta_extend import extend
from minisgl_zoo.recurrent.backend import DeltaLayer, RecurrentBackend, RecurrentInputs
from minisgl_zoo.recurrent.delta_rule import DeltaStep
from minisgl_zoo.recurrent.pool import RecurrentPool


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonRecurrentMetadata(BaseAttnMetadata):
    """num_prompts, num_prompt_tokens: the number of rows after the decode rows, and of their
    tokens."""

    num_prompts: int
    num_prompt_tokens: int


class TritonRecurrentBackend(RecurrentBackend):
    name = "triton"
    graph_safe = True

    def __init__(
        self,
        page_size: int,
        state_table: Tensor,
        hopper: tuple[DeltaDecode | None, DeltaPrompts | None] = (None, None),
    ) -> None:
        """hopper: for decode rows and for prompts; None leaves them to Triton."""
        super().__init__(page_size, state_table)
        self._decode, self._prompts = hopper

    def prepare(self, plan: Plan) -> TritonRecurrentMetadata:
        return TritonRecurrentMetadata(
            num_prompts=plan.num_rows - plan.num_decodes,
            num_prompt_tokens=plan.num_tokens - plan.num_decodes,
        )

    def forward(self, inputs: RecurrentInputs, layer: DeltaLayer, batch: PoolBatch) -> Tensor:
        rows, x_TD = batch.rows, inputs.x_TD
        assert rows is not None
        metadata: TritonRecurrentMetadata = batch.attn_metadata
        owners = metadata.once("owners", lambda: self._owners(rows, len(x_TD), metadata))
        pool: RecurrentPool = batch.context.kv_pool
        cache, row_table = pool.layer(layer.layer_id), batch.context.page_table
        mixed_TD = convolve(
            x_TD, inputs.weight_WD, inputs.bias_D, cache.tails, cache.inputs,
            batch.slots, owners, rows, row_table, self.state_table,
            num_prompts=metadata.num_prompts, interval=layer.interval, page_size=self.page_size,
        )  # fmt: skip
        out_TNV = torch.empty(
            (len(x_TD), layer.num_heads, layer.value_dim), dtype=x_TD.dtype, device=x_TD.device
        )
        step = DeltaStep(
            mixed_TD=mixed_TD, g_TN=inputs.g_TN, beta_TN=inputs.beta_TN, states=cache.states,
            keys=cache.keys, updates=cache.updates, decays=cache.decays, slots=batch.slots,
            rows=rows, row_table=row_table, state_table=self.state_table, out_TNV=out_TNV,
            skip_N=inputs.skip_N, interval=layer.interval, page_size=self.page_size,
        )  # fmt: skip
        num_decodes = rows.shape[1] - metadata.num_prompts
        if num_decodes:
            decode(step, num_decodes, self._decode)
        if metadata.num_prompts:
            prompts = replace(step, rows=rows[:, num_decodes:])
            extend(prompts, metadata.num_prompt_tokens, self._prompts)
        return out_TNV

    def _owners(self, rows: Tensor, num_tokens: int, metadata: TritonRecurrentMetadata) -> Tensor:
        """Return the row of each token, int32 [T]."""
        numbers = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
        if not metadata.num_prompts:
            return numbers
        return torch.repeat_interleave(numbers, rows[2], output_size=num_tokens)


def create(page_size: int, state_table: Tensor) -> TritonRecurrentBackend:
    """Return the backend of the current GPU."""
    made = on_hopper(lambda: (DeltaDecode(), DeltaPrompts()), "Triton computes the delta rule")
    return TritonRecurrentBackend(page_size, state_table, made or (None, None))
