"""A plan in the making: decode rows first, then chunks."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from minisgl.core.adapters import AdapterLoad
from minisgl.core.image import RowImages, end_of
from minisgl.core.plan import (
    PROMISED,
    Begin,
    History,
    NewPages,
    Plan,
    Pooled,
    Scored,
    Slotted,
    Stored,
)
from minisgl.core.req import IdArray, Req


class RowNeeds:
    """The rows of the request tables that need more than a sampled token. Mutable.

    late: rows that are sampled late. with_logprobs: rows that report log-probabilities. tops:
    `SamplingParams.top_logprobs` by row. with_options: rows whose options change the logits.
    """

    def __init__(self) -> None:
        self.late: set[int] = set()
        self.with_logprobs: set[int] = set()
        self.tops: dict[int, int] = {}
        self.with_options: set[int] = set()

    def add(self, req: Req) -> None:
        """Add the row of a request to the sets of its needs."""
        row, sampling = req.table_idx, req.sampling
        if req.masker:
            self.late.add(row)
        if sampling.logprobs:
            self.with_logprobs.add(row)
        if sampling.top_logprobs:
            self.tops[row] = sampling.top_logprobs
        if sampling.changes_logits:
            self.with_options.add(row)

    def __bool__(self) -> bool:
        return bool(self.late or self.with_logprobs or self.tops or self.with_options)

    def discard(self, row: int) -> None:
        """Remove the row of a request that leaves it."""
        for rows in (self.late, self.with_logprobs, self.with_options):
            rows.discard(row)
        self.tops.pop(row, None)


class PlanBuilder:
    """Lists that grow row by row. Mutable, short-lived. `Planner` itself appends the decodes.

    An attribute with the name of a field of `Plan` becomes this field. unfinished: running requests
    with more than one token left to compute, in order. with_chunk: uids that have a chunk in this
    step. is_full: no waiting request may start in this step. waits_for_slot: a request waits for a
    slot for its adapter, so none behind it that has an adapter may start in this step.
    """

    def __init__(self, step: int, needs: RowNeeds) -> None:
        self.step = step
        self._needs = needs
        self.histories: list[History] = []
        self.uids: list[int] = []
        self.table_idxs: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.decode_ids: list[int] = []
        self.chunks: list[IdArray] = []
        self.sample_rows: list[int] = []
        self.output_idxs: list[int] = []
        self.next_ids: list[int] = []
        self.new_pages: list[NewPages] = []
        self.stored: list[Stored] = []
        self.scored: list[Scored] = []
        self.images: list[RowImages] = []
        self.pooled: list[Pooled] = []
        self.image_begins: list[RowImages] = []
        self.begins: list[Begin] = []
        self.adapter_slots: list[Slotted] = []
        self.loads: list[AdapterLoad] = []
        self.num_drafts = 0
        self.unfinished: list[Req] = []
        self.with_chunk: set[int] = set()
        self.is_full = self.waits_for_slot = False

    def add_draft(self, req: Req, position: int, token: int, output_idx: int) -> None:
        """Add a decode row that computes a draft of a request behind its last row."""
        self.uids.append(req.uid)
        self.table_idxs.append(req.table_idx)
        self.starts.append(position)
        self.decode_ids.append(token)
        self.output_idxs.append(output_idx)
        self.num_drafts += 1

    def end_decodes(self) -> None:
        """Complete the decode rows: each has one token and samples."""
        self.ends = [start + 1 for start in self.starts]
        self.sample_rows = list(range(len(self.uids)))

    def add_chunk(self, req: Req, start: int, end: int) -> None:
        """Add a row that computes the tokens [start, end) of a request."""
        if end == req.num_known:
            self.sample_rows.append(len(self.uids))
            self.output_idxs.append(len(req.output))
            self.next_ids.append(PROMISED)
        else:
            self.next_ids.append(int(req.token_ids(end, end + 1)[0]))
        if start < req.num_stored:
            self.stored.append(Stored(len(self.uids), req.num_stored))
        if req.sampling.pooling:
            self.add_pooled(req, start, end)
        elif max(start, req.num_scored) < (scored_end := min(end, req.num_prompt - 1)):
            next_ids = req.prompt[start + 1 : scored_end + 1]
            num_top = req.sampling.prompt_logprobs or 0
            self.scored.append(Scored(len(self.uids), next_ids, num_top))
        if req.images and start < end_of(req.images):
            self.images.append(RowImages(len(self.uids), req.images))
        self.with_chunk.add(req.uid)
        self.uids.append(req.uid)
        self.table_idxs.append(req.table_idx)
        self.starts.append(start)
        self.ends.append(end)
        self.chunks.append(req.token_ids(start, end))

    def add_pooled(self, req: Req, start: int, end: int) -> None:
        """Let the next row, with the tokens [start, end) of a request, yield those to be pooled."""
        first = max(start, req.num_scored)
        if first < (pooled_end := min(end, 1) if req.sampling.pooling == "cls" else end):
            row, num_tokens = len(self.uids), pooled_end - first
            self.pooled.append(Pooled(row, first - start, num_tokens, req.sampling.logit_ids))

    def build(self) -> Plan:
        decode_ids = np.array(self.decode_ids, np.int32)
        mine = vars(self)
        plan = Plan(
            **{name: mine[name] for name in _FIELDS},
            token_ids=np.concatenate([decode_ids, *self.chunks]) if self.chunks else decode_ids,
            num_decodes=len(self.decode_ids),
        )
        if needs := self._needs:
            plan.late_rows = self._samples_of(needs.late)
            plan.logprob_rows = self._samples_of(needs.with_logprobs)
            plan.top_rows = top_rows = self._samples_of(needs.tops.keys())
            counts = [needs.tops[self.table_idxs[self.sample_rows[index]]] for index in top_rows]
            plan.num_top = max(counts, default=0)
            plan.option_rows = self._samples_of(needs.with_options)
        return plan

    def _samples_of(self, table_idxs: Set[int]) -> list[int]:
        """Return the indices into `sample_rows` of these requests' rows."""
        rows = enumerate(self.sample_rows)
        return [index for index, row in rows if self.table_idxs[row] in table_idxs]


_FIELDS = [name for name in Plan.__slots__ if name in vars(PlanBuilder(0, RowNeeds()))]
