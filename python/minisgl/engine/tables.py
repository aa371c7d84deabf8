"""What the engine remembers of each running request between steps, by table row.

::

    row   page table              last token   sampling
    0     | 17 | 4 | 5 | . | .|   | 1234 |     T=0.6, top_p=0.9, seed=7
    1     | 2  | . | . | . | .|   | 88   |     greedy
          host mirror and device  device only  host

The last token is what the row's last step sampled: a *promised* id that the host does not have
yet, which the next step reads here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import BatchSamplingArgs, Plan
from minisgl.engine.device import Device


class RequestTables:
    """Mutable; written only by the engine's steps, in stream order."""

    def __init__(self, device: Device, *, max_running: int, max_pages: int) -> None:
        self._device = device
        self._pages = np.zeros((max_running, max_pages), np.int32)
        self._temperature = np.zeros(max_running, np.float32)
        self._top_k = np.zeros(max_running, np.int32)
        self._top_p = np.ones(max_running, np.float32)
        self._min_p = np.zeros(max_running, np.float32)
        self._seed = np.zeros(max_running, np.int64)
        self.page_table: Tensor = torch.zeros(
            (max_running, max_pages), dtype=torch.int32, device=device.torch_device
        )
        self.last_token: Tensor = torch.zeros(
            max_running, dtype=torch.int32, device=device.torch_device
        )

    def update(self, plan: Plan) -> None:
        """Take in what the plan begins and where its new pages are."""
        for table_idx, sampling in plan.begins:
            self._temperature[table_idx] = sampling.temperature
            self._top_k[table_idx] = sampling.top_k
            self._top_p[table_idx] = sampling.top_p
            self._min_p[table_idx] = sampling.min_p
            # The seed's 64 bits, whichever integer they were written as.
            self._seed[table_idx] = np.uint64((sampling.seed or 0) % 2**64).astype(np.int64)
        if plan.new_pages:
            where = np.array(plan.new_pages, np.int64)
            self._pages[where[:, 0], where[:, 1]] = where[:, 2]
            rows, columns, pages = self._device.upload(list(where.T))
            self.page_table[rows, columns] = pages.int()

    def slots(
        self,
        table_idxs_T: npt.NDArray[np.int64],
        positions_T: npt.NDArray[np.int32],
        page_size: int,
    ) -> npt.NDArray[np.int32]:
        """int32 token slots of positions of table rows."""
        pages = self._pages[table_idxs_T, positions_T // page_size]
        slots: npt.NDArray[np.int32] = pages * np.int32(page_size) + positions_T % page_size
        return slots

    def sampling_args(self, plan: Plan) -> BatchSamplingArgs:
        """Of the rows that sample; a filter that no row uses is left out."""
        idxs = np.array([plan.table_idxs[row] for row in plan.sample_rows], np.int64)
        temperature = self._temperature[idxs]
        if not temperature.any():
            return BatchSamplingArgs(all_greedy=True)
        top_k, top_p, min_p = self._top_k[idxs], self._top_p[idxs], self._min_p[idxs]
        output_idx = np.array(plan.output_idxs, np.int64)
        temperatures, top_ks, top_ps, min_ps, seeds, output_idxs = self._device.upload(
            [temperature, top_k, top_p, min_p, self._seed[idxs], output_idx]
        )
        return BatchSamplingArgs(
            all_greedy=False,
            temperatures=temperatures,
            top_ks=top_ks if top_k.any() else None,
            top_ps=top_ps if (top_p < 1).any() else None,
            min_ps=min_ps if min_p.any() else None,
            seeds=seeds,
            output_idxs=output_idxs,
        )
