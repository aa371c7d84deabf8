"""Backends of recurrent layers: convolution and gated delta rule over the pools. That in torch is
here, that in C++ is in `kernel/csrc/recurrent.cpp`.

A *row* of a step is a request with tokens [start, end). The *rows in the cache* hold, for each
token of a request, a key, an update, a decay and an input of the convolution
(`minisgl_zoo.recurrent.delta_rule.Rows`). A row of a step reads the state at the last multiple of
the interval up to `start`, and the rows in the cache since then. If the last multiple up to `end`
is later, it writes the state there. It writes the rows in the cache of its tokens from that
multiple on::

    interval     |               |               |               |
    step                 start |==========================| end
    reads        S - - - - - - -
    writes                                       S - - - -

Axes: T tokens of this step, N value heads, K key heads, H key dim, V value dim, D inputs of the
convolution, W its taps (heads are local to the rank).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl import plugins
from minisgl.attention.base import BaseAttnMetadata
from minisgl.core import Plan, PoolBatch
from minisgl.core.req import IdArray
from minisgl.kernel.jit import load_library
from minisgl.kernel.once import JitUnavailable
from minisgl.kernel.ops import Ops
from minisgl.utils.logger import get_logger
from minisgl_zoo.recurrent.delta_rule import Rows, delta_rule, next_state, short_conv
from minisgl_zoo.recurrent.pool import RecurrentLayer, RecurrentPool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer:
    """The constants of one layer. pool, layer_id: see `AttnLayer`. interval: see `CacheGroup`."""

    pool: int
    layer_id: int
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    interval: int

    @property
    def sizes(self) -> list[int]:
        """The columns of queries, keys and values in D."""
        key_width = self.num_key_heads * self.key_dim
        return [key_width, key_width, self.num_heads * self.value_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentInputs:
    """The arguments of a layer in one step.

    x_TD: queries, keys and values side by side. g_TN, beta_TN: float32, log decays and weights.
    weight_WD, bias_D: of the convolution. skip_N: float32; with it the layer is Mamba2
    (`minisgl_zoo.recurrent.delta_rule`), whose heads add skip * values to their output.
    """

    x_TD: Tensor
    g_TN: Tensor
    beta_TN: Tensor
    weight_WD: Tensor
    bias_D: Tensor | None = None
    skip_N: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentMetadata(BaseAttnMetadata):
    """rows: int32 [3, B], the plan's table_idxs, starts and ends."""

    rows: IdArray


class RecurrentBackend(ABC):
    """Has the methods of `BaseAttnBackend` that the engine calls."""

    name: str
    graph_safe = False
    prompts_graph_safe = False
    reads_window_only = True
    takes_two_way = True
    short_rows = 0

    def __init__(self, page_size: int, state_table: Tensor) -> None:
        """state_table: the page table of the state group. (`Context.page_table` is that of the rows
        group.)"""
        self.page_size, self.state_table = page_size, state_table

    def prepare(self, plan: Plan) -> BaseAttnMetadata:
        return RecurrentMetadata(
            rows=np.array((plan.table_idxs, plan.starts, plan.ends), dtype=np.int32)
        )

    @abstractmethod
    def forward(self, inputs: RecurrentInputs, layer: DeltaLayer, batch: PoolBatch) -> Tensor:
        """Convolve x, and apply the gated delta rule or Mamba2. Returns [T, N, V] in x's dtype."""


class TorchRecurrentBackend(RecurrentBackend):
    """The reference: row after row, interval after interval."""

    name = "torch"

    def forward(self, inputs: RecurrentInputs, layer: DeltaLayer, batch: PoolBatch) -> Tensor:
        pool: RecurrentPool = batch.context.kv_pool
        cache = pool.layer(layer.layer_id)
        x_TD, skip_N, taps = inputs.x_TD, inputs.skip_N, len(inputs.weight_WD)
        out_TNV = x_TD.new_empty(len(x_TD), layer.num_heads, layer.value_dim)
        is_delta, num_before = skip_N is None, taps - 1
        offset = 0
        for table_idx, start, end in batch.attn_metadata.rows.T.tolist():
            span = slice(offset, offset + end - start)
            offset = span.stop
            # The state, the rows in the cache since, and the last inputs of the convolution.
            base = start // layer.interval * layer.interval
            slots = self._slots(batch.context.page_table[table_idx], base, start)
            state_NHV, tail_WD = self._state(cache, table_idx, base)
            ring = self._ring(slots[-num_before:], pool.ring)
            before_JD = torch.cat((tail_WD, cache.inputs[ring]))[-num_before:]
            x_JD = torch.cat((before_JD, x_TD[span]))
            convolved = short_conv(x_JD, inputs.weight_WD, inputs.bias_D)
            q, k, v = (x.contiguous() for x in torch.split(convolved, layer.sizes, dim=-1))
            rows = Rows(cache.keys[slots], cache.updates[slots], cache.decays[slots])
            # The outputs, interval by interval.
            at = start
            while at < end:
                if at % layer.interval == 0 and at > start:
                    state_NHV = next_state(state_NHV, rows, is_delta)
                    rows = Rows(*(x[:0] for x in (rows.keys, rows.updates, rows.decays)))
                until = min((at // layer.interval + 1) * layer.interval, end)
                part = slice(at - start, until - start)
                out, rows = delta_rule(
                    state_NHV,
                    rows,
                    q[part].view(until - at, -1, layer.key_dim),
                    k[part].view(until - at, -1, layer.key_dim),
                    v[part].view(until - at, -1, layer.value_dim),
                    inputs.g_TN[span][part],
                    inputs.beta_TN[span][part],
                    is_delta,
                )
                if skip_N is not None:
                    out = out + skip_N[:, None] * v[part].view(out.shape).float()
                out_TNV[span][part] = out.to(x_TD.dtype)
                at = until
            # What later steps read.
            newest = end // layer.interval * layer.interval
            if newest == end:
                state_NHV = next_state(state_NHV, rows, is_delta)
            else:
                new = min(end - start, end - newest)  # tokens to keep
                kept = batch.slots[span][-new:]
                ring = self._ring(kept[-num_before:], pool.ring)
                cache.inputs[ring] = x_TD[span][len(x_TD[span]) - len(ring) :]
                cache.keys[kept] = rows.keys[-new:]
                cache.updates[kept] = rows.updates[-new:]
                cache.decays[kept] = rows.decays[-new:]
            if newest > base:
                page = self.state_table[table_idx, newest // self.page_size - 1]
                cache.states[page] = state_NHV
                last = len(x_JD) - (end - newest)
                cache.tails[page] = x_JD[last - num_before : last]
        return out_TNV

    def _slots(self, pages: Tensor, base: int, start: int) -> Tensor:
        """Return the slots of tokens [base, start)."""
        positions = torch.arange(base, start, device=pages.device)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size

    def _ring(self, slots: Tensor, ring: int) -> Tensor:
        """Return the indices in `RecurrentLayer.inputs` of tokens at these slots."""
        return slots // self.page_size * ring + slots % self.page_size % ring

    def _state(self, cache: RecurrentLayer, table_idx: int, base: int) -> tuple[Tensor, Tensor]:
        """Return the state at `base` and the inputs of the convolution before it; zeros at 0."""
        if base == 0:
            return torch.zeros_like(cache.states[0]), torch.zeros_like(cache.tails[0])
        page = self.state_table[table_idx, base // self.page_size - 1]
        return cache.states[page], cache.tails[page]


logger = get_logger(__name__)


def create_recurrent_backend(
    name: str, ops: Ops, device: torch.device, page_size: int, state_table: Tensor
) -> RecurrentBackend:
    """Return the backend. name: "torch" for the reference, any other for the fastest on
    `device`."""
    reference = TorchRecurrentBackend(page_size, state_table)
    if name == "torch":
        return reference
    if device.type == "cpu":
        library = library_of(ops)
        return CpuRecurrentBackend(library, page_size, state_table) if library else reference
    create = plugins.find("ops", "recurrent", device=device.type)
    if create is None:
        logger.warning("recurrent layers: plain torch, slower (minisgl_kernels is not installed)")
        return reference
    backend: RecurrentBackend = create(page_size, state_table)
    return backend


def library_of(ops: Ops) -> Any:
    """Return the C++ kernels of a CPU (`CpuOps.calls`), or None if they cannot be had."""
    try:
        return getattr(ops, "calls", None) or load_library()
    except JitUnavailable:  # `create_attention_backend` has logged it
        return None


class CpuRecurrentBackend(RecurrentBackend):
    name = "cpu"
    graph_safe = True

    def __init__(self, library: Any, page_size: int, state_table: Tensor) -> None:
        """`library` is what `minisgl.kernel.jit.load_library` returned, or its `Calls`."""
        super().__init__(page_size, state_table)
        self._step = library.recurrent_step

    def prepare(self, plan: Plan) -> BaseAttnMetadata:
        return BaseAttnMetadata()

    def forward(self, inputs: RecurrentInputs, layer: DeltaLayer, batch: PoolBatch) -> Tensor:
        pool: RecurrentPool = batch.context.kv_pool
        cache, x_TD = pool.layer(layer.layer_id), inputs.x_TD
        out_TNV = torch.empty(len(x_TD), layer.num_heads, layer.value_dim, dtype=x_TD.dtype)
        self._step(
            x_TD,
            torch.empty(x_TD.shape, dtype=x_TD.dtype),
            inputs.g_TN,
            inputs.beta_TN,
            inputs.weight_WD,
            inputs.bias_D,
            inputs.skip_N,
            cache.states,
            cache.tails,
            cache.inputs,
            cache.keys,
            cache.updates,
            cache.decays,
            batch.slots,
            batch.context.page_table,
            self.state_table,
            batch.rows,
            out_TNV,
            pool.ring,
            layer.interval,
            self.page_size,
            torch.get_num_threads(),
        )
        return out_TNV
