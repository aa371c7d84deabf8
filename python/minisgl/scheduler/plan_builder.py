"""A plan in the making: decode rows first, then chunks."""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np

from minisgl.core.plan import History, NewPage, Plan
from minisgl.core.req import IdArray, Req
from minisgl.core.sampling import SamplingParams


class PlanBuilder:
    """Lists that grow row by row. Short-lived and mutable; `Scheduler` appends decodes itself.

    unfinished: running requests with more than one token left to compute, in order. with_chunk:
    uids that have a chunk in this step. is_full: no waiting request may start in this step.
    late, with_logprobs: table rows of the requests that are sampled late, and of those that ask for
    log-probabilities. tops: table row to `SamplingParams.top_logprobs`, if it is not 0.
    with_options: table rows of the requests with options that change the logits.
    """

    def __init__(
        self,
        step: int,
        *,
        late: Set[int],
        with_logprobs: Set[int],
        tops: Mapping[int, int],
        with_options: Set[int],
    ) -> None:
        self.step = step
        self._late = late
        self._with_logprobs = with_logprobs
        self._tops = tops
        self._with_options = with_options
        self.histories: list[History] = []
        self.uids: list[int] = []
        self.table_idxs: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.decode_ids: list[int] = []
        self.chunks: list[IdArray] = []
        self.sample_rows: list[int] = []
        self.output_idxs: list[int] = []
        self.new_pages: list[NewPage] = []
        self.stored: list[tuple[int, int]] = []
        self.begins: list[tuple[int, SamplingParams]] = []
        self.unfinished: list[Req] = []
        self.with_chunk: set[int] = set()
        self.is_full = False

    def end_decodes(self) -> None:
        """Complete the decode rows: each has one token and samples."""
        self.ends = [start + 1 for start in self.starts]
        self.sample_rows = list(range(len(self.uids)))

    def add_chunk(self, req: Req, start: int, end: int) -> None:
        if end == req.num_known:
            self.sample_rows.append(len(self.uids))
            self.output_idxs.append(len(req.output))
        if start < req.num_stored:
            self.stored.append((len(self.uids), req.num_stored))
        self.with_chunk.add(req.uid)
        self.uids.append(req.uid)
        self.table_idxs.append(req.table_idx)
        self.starts.append(start)
        self.ends.append(end)
        self.chunks.append(req.token_ids(start, end))

    def build(self) -> Plan:
        decode_ids = np.array(self.decode_ids, np.int32)
        top_rows = self._samples_of(self._tops.keys())
        counts = [self._tops[self.table_idxs[self.sample_rows[index]]] for index in top_rows]
        return Plan(
            step=self.step,
            uids=self.uids,
            table_idxs=self.table_idxs,
            starts=self.starts,
            ends=self.ends,
            token_ids=np.concatenate([decode_ids, *self.chunks]) if self.chunks else decode_ids,
            num_decodes=len(self.decode_ids),
            sample_rows=self.sample_rows,
            output_idxs=self.output_idxs,
            late_rows=self._samples_of(self._late),
            logprob_rows=self._samples_of(self._with_logprobs),
            top_rows=top_rows,
            num_top=max(counts, default=0),
            option_rows=self._samples_of(self._with_options),
            histories=self.histories,
            new_pages=self.new_pages,
            stored=self.stored,
            begins=self.begins,
        )

    def _samples_of(self, table_idxs: Set[int]) -> list[int]:
        """Return the indices into `sample_rows` of these requests' rows."""
        if not table_idxs:
            return []
        rows = enumerate(self.sample_rows)
        return [index for index, row in rows if self.table_idxs[row] in table_idxs]
