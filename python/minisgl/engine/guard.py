"""A debug mode (`MINISGL_CHECK_PAGES=1`): a wrong page is found in the step that touches it.

Memory checkers see the KV pool as one allocation, so they miss a row that reads or writes a page of
somebody else. Two checks see it. On the host, from the plan alone: a row writes only pages that it
alone has. On the device: a page that is given out anew is filled with NaN, and the logits of each
step are searched for it, since whoever reads a slot that nobody wrote computes NaN. Of several
ranks the one that samples the row finds it, and its end is everybody's. It costs a wait for the
device in each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.errors import EngineError
from minisgl.kvcache.pool import BaseKVCachePool


class PageGuard:
    """Mutable: which table rows have each page, and a flag on the device."""

    def __init__(self, pool: BaseKVCachePool, num_layers: int, page_size: int) -> None:
        self._layers = [pool.layer(index) for index in range(num_layers)]
        self._page_size = page_size
        self._holders: dict[int, set[int]] = {}  # by page, since it was given out anew
        self._pages: dict[int, dict[int, int]] = {}  # by table row: index in it -> page
        self._saw_nan = torch.zeros((), dtype=torch.bool, device=self._layers[0].k.device)
        self._is_in_step = False
        self._follows_a_failed_one = False

    def before(self, plan: Plan) -> None:
        """Take in whose pages are whose; fill new ones. Raises EngineError for a shared write.

        A step of the start (its number is below 0) is not checked: it may read what it likes.
        """
        if plan.step < 0:
            return
        self._follows_a_failed_one, self._is_in_step = self._is_in_step, True
        for table_idx, _ in plan.begins:
            for page in self._pages.pop(table_idx, {}).values():
                self._holders[page].discard(table_idx)
        starts = dict(zip(plan.table_idxs, plan.starts, strict=True))
        fresh, cached = [], []
        for _, table_idx, index, page in plan.new_pages:
            self._pages.setdefault(table_idx, {})[index] = page
            if index * self._page_size >= starts[table_idx]:
                fresh.append(page)
                self._holders[page] = {table_idx}
            else:
                cached.append((page, table_idx))
        for table_idx, start, end in zip(plan.table_idxs, plan.starts, plan.ends, strict=True):
            for index in range(start // self._page_size, -(-end // self._page_size)):
                page = self._pages[table_idx][index]
                if self._holders[page] != {table_idx}:
                    raise EngineError(
                        f"step {plan.step}: table row {table_idx} writes page {page}, which rows "
                        f"{sorted(self._holders[page])} have"
                    )
        for page, table_idx in cached:  # also pages that another row writes in this very step
            self._holders.setdefault(page, set()).add(table_idx)
        if fresh:
            where = torch.tensor(fresh, device=self._saw_nan.device)
            for layer in self._layers:
                layer.k[where] = torch.nan
                layer.v[where] = torch.nan

    def watch(self, logits_SV: Tensor, is_padding_S: Tensor) -> None:
        """On the device, so that a graph may capture it."""
        self._saw_nan.logical_or_((logits_SV.isnan().any(-1) & ~is_padding_S).any())

    def after(self, plan: Plan) -> None:
        """Raises EngineError if the step read what nobody had written. Behind a step that failed,
        which left out what it should have written, that may be: such a step does not count (docs/
        decisions/0005)."""
        if plan.step < 0:
            self._saw_nan.zero_()
            return
        self._is_in_step = False
        if bool(self._saw_nan):
            self._saw_nan.zero_()
            if not self._follows_a_failed_one:
                raise EngineError(
                    f"step {plan.step}: NaN in the logits: a row read a slot that nobody wrote, or "
                    "the model computes NaN by itself"
                )
