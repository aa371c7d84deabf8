"""A debug mode (`MINISGL_CHECK_PAGES=1`) that finds a wrong page in the step that touches it.

To memory checkers a KV pool is one allocation, so they miss a row that reads or writes a page of
another row. Two checks find it. On the host, from the plan: a row may write only pages that no
other row has. On the device: each newly allocated page is filled with NaN, and the logits of each
step are searched for NaN. A row that reads a slot which no step wrote has NaN in its logits. With
several ranks, the rank that samples the row finds it, and then all end. Every step waits for the
device.

Some attention kernels read whole blocks at the start of a window and mask the keys before it, whose
pages may belong to other rows. Pages of such window groups are not filled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.core import Context, Plan
from minisgl.core.groups import CacheGroup
from minisgl.errors import EngineError
from minisgl.kvcache.pool import LayerPool
from minisgl.models import PoolSpec


class PageGuard:
    """Mutable: it keeps which table rows have each page, and a flag on the device."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: Sequence[PoolSpec],
        contexts: Sequence[Context],
        page_size: int,
    ) -> None:
        self._page_size = page_size
        self._groups = groups
        self._filled: list[list[Tensor]] = [[] for _ in groups]  # [pages, ...] each
        for pool, context in zip(pools, contexts, strict=True):
            layers = [context.kv_pool.layer(index) for index in range(pool.num_layers)]
            if pool.is_recurrent:
                for layer in layers:
                    for group, pages in pool.guarded(layer, groups):
                        self._filled[group].append(pages)
            elif groups[pool.group].kind == "full" or context.attn.reads_window_only:
                self._filled[pool.group] += (x for layer in layers for x in _fillable(layer))
        # For each cache group: page -> the rows that have it since it was last allocated; and table
        # row -> page index -> page.
        self._holders: list[dict[int, set[int]]] = [{} for _ in groups]
        self._pages: list[dict[int, dict[int, int]]] = [{} for _ in groups]
        self._saw_nan = torch.zeros((), dtype=torch.bool, device=contexts[0].page_table.device)
        self._is_in_step = False
        self._follows_a_failed_one = False

    def before(self, plan: Plan) -> None:
        """Record the plan's pages and fill the new ones.

        Probes, whose step number is below 0, are not checked: they may read any page. Raises
        EngineError if a row would write a page that another row has.
        """
        if plan.step < 0:
            return
        self._follows_a_failed_one, self._is_in_step = self._is_in_step, True
        for group in range(len(self._filled)):
            self._check(plan, group)

    def _check(self, plan: Plan, group: int) -> None:
        holders, tables = self._holders[group], self._pages[group]
        for table_idx, _ in plan.begins:
            for page in tables.pop(table_idx, {}).values():
                holders[page].discard(table_idx)
        # A request's first row counts; drafts follow it.
        starts = dict(zip(plan.table_idxs[::-1], plan.starts[::-1], strict=True))
        stored = dict(plan.stored) if group == 0 else {}
        for row, position in stored.items():
            starts[plan.table_idxs[row]] = position
        fresh, cached = [], []
        for number, table_idx, first, pages in plan.new_pages:
            if number != group:
                continue
            for index, page in enumerate(pages, first):
                tables.setdefault(table_idx, {})[index] = page
                # A request may start with cached pages and get its first row in a later step.
                if (index + 1) * self._page_size > starts.get(table_idx, math.inf):
                    fresh.append(page)
                    holders[page] = {table_idx}
                else:
                    cached.append((page, table_idx))
        for table_idx, end in zip(plan.table_idxs, plan.ends, strict=True):
            for index in self._written(self._groups[group], starts[table_idx], end):
                page = tables[table_idx][index]
                if holders[page] != {table_idx}:
                    raise EngineError(
                        f"step {plan.step}: table row {table_idx} writes page {page}, which rows "
                        f"{sorted(holders[page])} have"
                    )
        for page, table_idx in cached:  # another row may write them in this same step
            holders.setdefault(page, set()).add(table_idx)
        if fresh:
            where = torch.tensor(fresh, device=self._saw_nan.device)
            for pool in self._filled[group]:
                pool[where] = torch.nan

    def _written(self, group: CacheGroup, start: int, end: int) -> range:
        """Return the page indices that a row [start, end) writes in the group."""
        page_size = self._page_size
        if group.kind == "state":
            last = group.newest(end) // page_size
            return range(last - (group.newest(end) > group.newest(start)), last)
        first = max(start, group.newest(end)) if group.kind == "rows" else start
        return range(first // page_size, -(-end // page_size))

    def watch(self, logits_SV: Tensor, is_padding_S: Tensor) -> None:
        """Search logits for NaN, on the device, so that a graph may capture it."""
        self._saw_nan.logical_or_((logits_SV.isnan().any(-1) & ~is_padding_S).any())

    def after(self, plan: Plan) -> None:
        """Raise EngineError if the step read a slot that no step wrote. The step after a failed one
        may do so, because its results are discarded (docs/decisions/0005)."""
        if plan.step < 0:
            self._saw_nan.zero_()
            return
        self._is_in_step = False
        if bool(self._saw_nan):
            self._saw_nan.zero_()
            if not self._follows_a_failed_one:
                raise EngineError(
                    f"step {plan.step}: NaN in the logits: a row read a slot that no row wrote, or "
                    "the model computes NaN by itself"
                )


def _fillable(layer: LayerPool) -> tuple[Tensor, ...]:
    """Return the tensors of a layer's pages in which a NaN makes a token that reads it NaN."""
    if layer.k.dtype == torch.int8 and layer.k_scale is not None and layer.v_scale is not None:
        return layer.k_scale, layer.v_scale  # int8 has no NaN
    return layer.k, layer.v
