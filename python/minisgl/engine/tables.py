"""The request tables: what the engine keeps between steps, one row per running request.

::

    row   page table              last token   sampling
    0     | 17 | 4 | 5 | . | .|   | 1234 |     T=0.6, top_p=0.9, seed=7
    1     | 2  | . | . | . | .|   | 88   |     greedy
    last  | 0  | 0 | 0 | 0 | 0|   | .    |     greedy: the row that padding rows use
          host and device         device only  host

The last token is the id that the row's last step sampled. The next step reads it here, because the
host may not have it yet (the promise, `minisgl.core.req`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.core.batch_sampling import FILTERS, SAMPLING_COLUMNS, sampling_row
from minisgl.core.groups import FULL, CacheGroup
from minisgl.engine.device import Device

MIN_COMMON_ROWS = 4
MIN_COMMON_TOKENS = 256
"""A common prefix is read once for all rows only if there are so many rows, and tokens in it. With
fewer, this costs more time than it saves."""


class RequestTables:
    """Mutable; written only by the engine's steps, in stream order.

    has_slots: whether a row has, or had last, a request with an adapter.
    """

    def __init__(
        self,
        device: Device,
        *,
        request_rows: int,
        max_pages: int,
        groups: Sequence[CacheGroup] = (FULL,),
    ) -> None:
        """request_rows: rows that requests can have; padding rows use the one after them.
        page_table: int32 [G * R, P], the tables of G cache groups one below the other, R rows of P
        pages each."""
        self.request_rows = self.padding_idx = request_rows
        self.groups = groups
        if len(groups) > 1:
            # Kernels are compiled for page tables that begin at multiples of 16 bytes.
            max_pages = -(-max_pages // 4) * 4
        self._num_rows = request_rows + 1
        self._pages = np.zeros((len(groups) * self._num_rows, max_pages), np.int32)
        self.has_slots = False
        self._slots = np.zeros(self._num_rows, np.int32)
        self._sampling = {
            name: np.full(self._num_rows, column.neutral, column.dtype)
            for name, column in SAMPLING_COLUMNS.items()
        }
        self.page_table: Tensor = torch.zeros(
            self._pages.shape, dtype=torch.int32, device=device.torch_device
        )
        self.last_token: Tensor = torch.zeros(
            self._num_rows, dtype=torch.int32, device=device.torch_device
        )

    def group_table(self, group: int) -> Tensor:
        """Return a view of a cache group's page table on the device, int32 [R, P]."""
        first = group * self._num_rows
        return self.page_table[first : first + self._num_rows]

    def update(self, plan: Plan) -> npt.NDArray[np.int64]:
        """Copy the plan's new rows and pages to the host copy of the tables.

        Returns the pages to write on the device, [3, N]: row of `page_table`, page index, page.
        """
        for table_idx, sampling in plan.begins:
            values = sampling_row(sampling)
            for column, value in zip(self._sampling.values(), values, strict=True):
                column[table_idx] = value
        if plan.adapter_slots or (self.has_slots and plan.begins):
            for table_idx, _ in plan.begins:
                self._slots[table_idx] = 0
            for table_idx, slot in plan.adapter_slots:
                self._slots[table_idx] = slot
            self.has_slots = bool(self._slots.any())
        runs = [
            (run.group * self._num_rows + run.table_idx, run.first, len(run.pages))
            for run in plan.new_pages
        ]
        rows, firsts, counts = np.array(runs, np.int64).reshape(-1, 3).T
        pages = np.fromiter(chain.from_iterable(run.pages for run in plan.new_pages), np.int64)
        columns = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(len(pages))
        rows = np.repeat(rows, counts)
        self._pages[rows, columns] = pages
        return np.stack((rows, columns, pages))

    def adapter_slots(self, table_idxs: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Return the slot of the adapter of each row, 0 for none; None if no row has one."""
        slots = self._slots[table_idxs]
        return slots if slots.any() else None

    def common_tokens(self, plan: Plan, page_size: int) -> int:
        """Return the length of the common prefix that all rows of a decode step have in the same
        pages.

        Returns 0 if it is too short or the rows are too few, or if the first group is not full.
        """
        if self.groups[0].kind != "full" or plan.num_rows < MIN_COMMON_ROWS:
            return 0
        idxs = np.array(plan.table_idxs, np.int64)
        num_pages = min(plan.starts) // page_size  # whole pages, with a token left for each row
        if num_pages * page_size < MIN_COMMON_TOKENS:
            return 0
        least = -(-MIN_COMMON_TOKENS // page_size) - 1  # the page of the last of these tokens
        if (self._pages[idxs, least] != self._pages[idxs[0], least]).any():
            return 0  # the usual case compares one column only
        pages = self._pages[idxs, :num_pages]
        same = (pages == pages[0]).all(axis=0)
        count = num_pages if same.all() else int(same.argmin())
        return count * page_size if count * page_size >= MIN_COMMON_TOKENS else 0

    def slots(
        self,
        table_idxs_T: npt.NDArray[np.int32],
        positions_T: npt.NDArray[np.int32],
        page_size: int,
        group: int,
    ) -> npt.NDArray[np.int32]:
        """Return the slot of each (table row, position) in a cache group, int32 [T]."""
        if group:
            table_idxs_T = table_idxs_T + np.int32(group * self._num_rows)
        pages = self._pages[table_idxs_T, positions_T // page_size]
        slots: npt.NDArray[np.int32] = pages * np.int32(page_size) + positions_T % page_size
        return slots

    def sampling_columns(self, table_idxs_S: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Return the columns [S] that these rows need, by name.

        If all rows are greedy, they need none. Without `FILTERS` if no row's filter has an effect.
        """
        if not self._sampling["temperatures"][table_idxs_S].any():
            return {}
        sampling = {name: values[table_idxs_S] for name, values in self._sampling.items()}
        if any((sampling[name] != SAMPLING_COLUMNS[name].neutral).any() for name in FILTERS):
            return sampling
        return {name: values for name, values in sampling.items() if name not in FILTERS}
