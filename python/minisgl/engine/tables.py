"""What the engine remembers of each running request between steps, by table row.

::

    row   page table              last token   sampling
    0     | 17 | 4 | 5 | . | .|   | 1234 |     T=0.6, top_p=0.9, seed=7
    1     | 2  | . | . | . | .|   | 88   |     greedy
    last  | 0  | 0 | 0 | 0 | 0|   | .    |     padding's: no request has it
          host mirror and device  device only  host

The last token is what the row's last step sampled: a *promised* id that the host does not have
yet, which the next step reads here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.engine.device import Device

MIN_SHARED_ROWS = 4
MIN_SHARED_TOKENS = 256
"""Below either, reading a shared beginning once saves less than its launch costs."""

LEAST_TOP_P = float(np.finfo(np.float32).tiny)
"""A smaller one would be 0 as a float32, and keep nothing."""


class RequestTables:
    """Mutable; written only by the engine's steps, in stream order."""

    def __init__(self, device: Device, *, max_running: int, max_pages: int) -> None:
        self.padding_idx = max_running
        self._pages = np.zeros((max_running + 1, max_pages), np.int32)
        self._temperature = np.zeros(max_running + 1, np.float32)
        self._top_k = np.zeros(max_running + 1, np.int32)
        self._top_p = np.ones(max_running + 1, np.float32)
        self._min_p = np.zeros(max_running + 1, np.float32)
        self._seed = np.zeros(max_running + 1, np.int64)
        self.page_table: Tensor = torch.zeros(
            (max_running + 1, max_pages), dtype=torch.int32, device=device.torch_device
        )
        self.last_token: Tensor = torch.zeros(
            max_running + 1, dtype=torch.int32, device=device.torch_device
        )

    def update(self, plan: Plan) -> npt.NDArray[np.int64]:
        """Take in, on the host, what the plan begins and where its new pages are.

        Returns the pages, [N, 3], for the device: table row, index in it, page.
        """
        for table_idx, sampling in plan.begins:
            self._temperature[table_idx] = sampling.temperature
            self._top_k[table_idx] = sampling.top_k
            self._top_p[table_idx] = max(sampling.top_p, LEAST_TOP_P)
            self._min_p[table_idx] = sampling.min_p
            # The seed's 64 bits, whichever integer they were written as.
            self._seed[table_idx] = np.uint64((sampling.seed or 0) % 2**64).astype(np.int64)
        new_pages = np.array(plan.new_pages, np.int64).reshape(-1, 3)
        self._pages[new_pages[:, 0], new_pages[:, 1]] = new_pages[:, 2]
        return new_pages

    def shared_tokens(self, plan: Plan, page_size: int) -> int:
        """How many tokens all rows of a decode step have in the same pages at the front; 0 where
        that is not worth a launch."""
        if plan.num_rows < MIN_SHARED_ROWS:
            return 0
        idxs = np.array(plan.table_idxs, np.int64)
        num_pages = min(plan.starts) // page_size  # whole pages, with a token left for each row
        if num_pages * page_size < MIN_SHARED_TOKENS:
            return 0
        least = -(-MIN_SHARED_TOKENS // page_size) - 1  # the page with the last of them
        if (self._pages[idxs, least] != self._pages[idxs[0], least]).any():
            return 0  # the common case costs one column
        pages = self._pages[idxs, :num_pages]
        same = (pages == pages[0]).all(axis=0)
        count = num_pages if same.all() else int(same.argmin())
        return count * page_size if count * page_size >= MIN_SHARED_TOKENS else 0

    def slots(
        self,
        table_idxs_T: npt.NDArray[np.int32],
        positions_T: npt.NDArray[np.int32],
        page_size: int,
    ) -> npt.NDArray[np.int32]:
        """int32 token slots of positions of table rows."""
        pages = self._pages[table_idxs_T, positions_T // page_size]
        slots: npt.NDArray[np.int32] = pages * np.int32(page_size) + positions_T % page_size
        return slots

    def sampling(
        self, table_idxs_S: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32],
               npt.NDArray[np.float32], npt.NDArray[np.int64]]:  # fmt: skip
        """Temperatures, top-k, top-p, min-p and seeds of table rows."""
        return (
            self._temperature[table_idxs_S],
            self._top_k[table_idxs_S],
            self._top_p[table_idxs_S],
            self._min_p[table_idxs_S],
            self._seed[table_idxs_S],
        )
