"""What a step computes, as host integers, and its outcome.

Row ``i`` of a plan computes the KV of positions [starts[i], ends[i]) of request ``uids[i]``, whose
page table and last token are row ``table_idxs[i]`` of the engine's tables::

    page table   |== pages of table_idx 0 ==|            one row per running request
                 |== pages of table_idx 1 ======|
                        starts[i]   ends[i]
    request      |------|===========|- - - -|
                 cached   this step   later steps

A plan has one list for each field of its rows. With 256 running requests, making a record for each
row would take longer than planning.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.core.req import IdArray
from minisgl.core.sampling import SamplingParams
from minisgl.errors import EngineError

NewPage = tuple[int, int, int, int]
"""(cache group, table_idx, page index, page id): an entry of a group's page table."""

PROMISED = -1
"""In `Plan.token_ids`: the id that the request's last launched row samples. The host lacks it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Plan:
    """A step. The decode rows, of one token each, come first. Not changed once it is planned.

    num_decodes: rows [0, num_decodes) compute one token, and all tokens before it are computed.
    token_ids: int32, the rows' spans one after another; `PROMISED` for ids that the host lacks.
    sample_rows: indices of rows whose last position yields a token, ascending.
    output_idxs: for each of `sample_rows`, the index of the token in its request's output.
    late_rows: indices into `sample_rows` of the rows with a mask. The mask depends on the token
        before, so a step with late rows is sampled once the step before is committed.
    logprob_rows: indices into `sample_rows` of the rows whose requests ask for log-probabilities.
    top_rows: indices into `sample_rows` of the rows whose requests ask for the most likely tokens.
    num_top: how many of them, the most that a row asks for.
    new_pages: entries of the page tables, to be written before the step.
    stored: (row, position): the row's tokens below that position are computed again for other cache
        groups, but the full group has their KV in pages of the prefix cache, which no step writes.
    begins: (table_idx, sampling) of requests that get a row of the tables in this step. Their
        sampling has a seed.
    """

    step: int
    uids: list[int]
    table_idxs: list[int]
    starts: list[int]
    ends: list[int]
    token_ids: IdArray
    num_decodes: int
    sample_rows: list[int]
    output_idxs: list[int]
    late_rows: list[int] = field(default_factory=list)
    logprob_rows: list[int] = field(default_factory=list)
    top_rows: list[int] = field(default_factory=list)
    num_top: int = 0
    new_pages: list[NewPage] = field(default_factory=list)
    stored: list[tuple[int, int]] = field(default_factory=list)
    begins: list[tuple[int, SamplingParams]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.uids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The output of a step. ``next_ids[j]`` belongs to row ``plan.sample_rows[j]``.

    logprobs: the log-probability of ``next_ids[j]``, for each j of ``plan.logprob_rows``. tops: for
    each j of ``plan.top_rows`` the most likely tokens, (id, log-probability), the likeliest first.
    With several ranks only rank 0's values count; no plan depends on them.
    """

    next_ids: list[int]
    logprobs: dict[int, float] = field(default_factory=dict)
    tops: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """The step failed. No later step may use the KV that it was to write.

    uids: the requests that fail. The other requests of the plan are computed again.
    """

    error: EngineError
    uids: tuple[int, ...]


StepOutcome = StepResult | StepFailed
