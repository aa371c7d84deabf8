"""A step as host integers: what it computes, its outcome, and the interface of what runs it.

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from minisgl.core.adapters import AdapterLoad
from minisgl.core.image import RowImages
from minisgl.core.req import FloatArray, IdArray, Mask
from minisgl.core.sampling import SamplingParams
from minisgl.errors import EngineError


class NewPages(NamedTuple):
    """Neighbouring entries of a page table, to be written before the step: a run.

    A run, because the prompts of a step may have many thousands of pages. A record for each would
    take longer than planning, and keep the garbage collector busy.
    """

    group: int
    table_idx: int
    first: int  # the column of the first one: the page's index in the request
    pages: list[int]


class Stored(NamedTuple):
    """The prefix cache has the KV of a row's tokens below a position, but only of the full group.
    The step computes them again for the other cache groups. It must not write the full group's
    pages."""

    row: int
    position: int


class Begin(NamedTuple):
    """A request gets a row of the tables in this step."""

    table_idx: int
    sampling: SamplingParams  # with a seed


class Slotted(NamedTuple):
    """The slot of the adapter of a request that gets a row of the tables."""

    table_idx: int
    slot: int


class History(NamedTuple):
    """The tokens so far of a request that takes a row of the tables and whose sampling options,
    such as penalties, change the logits."""

    table_idx: int
    num_prompt: int
    stop_ids: tuple[int, ...]
    ids: bytes  # int32


class Scored(NamedTuple):
    """A row of prompt tokens to score: its i-th token yields the log-probability of the i-th next
    id."""

    row: int
    next_ids: IdArray
    num_top: int  # as many of the most likely tokens are reported, too


class Score(NamedTuple):
    """What a scored row yields."""

    logprobs: list[float]  # of the next ids
    tops: list[list[tuple[int, float]]]  # (id, log-probability) there, the likeliest first


class Pooled(NamedTuple):
    """A row some tokens of which are pooled (`SamplingParams.pooling`)."""

    row: int
    first: int  # the first of these tokens in the row
    num_tokens: int
    logit_ids: tuple[int, ...]  # the row yields their logits, if any, else its hidden states' sum


PROMISED = -1
"""In `Plan.token_ids`: the id that the request's last launched row samples. Only the device has it.
"""
MOST_DRAFTS, MOST_DRAFT_ROWS = 15, 64
"""Of one request in a step, and the most decode rows of a step that has drafts. Even at a rate of
0.95 each, the sixteenth draft survives in less than half of all steps. 64 rows are as many as a CPU
replays (`minisgl_kernels.recorded_steps`)."""


def most_decode_rows(most_running: int, has_drafts: bool) -> int:
    """Return the most decode rows of a step: one for each running request, and drafts."""
    if not has_drafts:
        return most_running
    return max(most_running, min(most_running * (1 + MOST_DRAFTS), MOST_DRAFT_ROWS))


@dataclass(slots=True, kw_only=True, eq=False)
class Plan:
    """A step. The decode rows, of one token each, come first. Never changed after planning."""

    step: int
    uids: list[int]
    table_idxs: list[int]
    starts: list[int]
    ends: list[int]
    token_ids: IdArray  # of row 0, then row 1, ...; `PROMISED` for ids that the host lacks
    num_decodes: int  # the first rows: each computes one token, with KV of all tokens before it
    num_drafts: int = 0  # the last of the decode rows compute drafts (`minisgl.scheduler.drafting`)
    next_ids: list[int] = field(default_factory=list)
    """For each row after the decodes, the token after its last one; `PROMISED` if the row samples
    it."""
    sample_rows: list[int]  # rows whose last position yields a token, ascending
    output_idxs: list[int]  # for each of `sample_rows`, the token's index in the output

    # Sampling rows whose requests ask for more, as indices into `sample_rows`.
    late_rows: list[int] = field(default_factory=list)
    """With a mask. It depends on the row's previous token, so the step is sampled after the
    previous step is committed."""
    logprob_rows: list[int] = field(default_factory=list)  # with log-probabilities
    top_rows: list[int] = field(default_factory=list)  # with the most likely tokens
    num_top: int = 0  # the most tokens that one of `top_rows` asks for
    option_rows: list[int] = field(default_factory=list)  # with options that change the logits

    scored: list[Scored] = field(default_factory=list)  # ascending
    images: list[RowImages] = field(default_factory=list)  # ascending; of prompt rows
    pooled: list[Pooled] = field(default_factory=list)  # ascending
    image_begins: list[RowImages] = field(default_factory=list)  # of `begins`; `row` is table_idx
    histories: list[History] = field(default_factory=list)  # of those of `begins` with options
    new_pages: list[NewPages] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    begins: list[Begin] = field(default_factory=list)
    adapter_slots: list[Slotted] = field(default_factory=list)  # those of `begins` with an adapter
    loads: list[AdapterLoad] = field(default_factory=list)  # before the step

    @property
    def reports(self) -> bool:
        """Whether the step reports more of its prompts than their next tokens."""
        return bool(self.scored or self.pooled)

    @property
    def num_rows(self) -> int:
        return len(self.uids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The output of a step. ``next_ids[j]`` belongs to row ``plan.sample_rows[j]``; it is -1 if the
    row's logits are not finite.

    logprobs: the log-probability of ``next_ids[j]``, for each j of ``plan.logprob_rows``. tops: for
    each j of ``plan.top_rows`` the most likely tokens as (id, log-probability), the likeliest
    first. scores: one for each of ``plan.scored``. pooled: one for each of ``plan.pooled``, a sum
    of hidden states or a row of logits. The ranks may compute different logprobs, tops, scores and
    pooled rows, so planning does not use these; clients get rank 0's. guesses: for each of
    ``next_ids`` the guesses of the tokens after it by the model or its draft model, -1 from where
    there are none; empty for an engine that guesses nothing.
    """

    next_ids: list[int]
    logprobs: dict[int, float] = field(default_factory=dict)
    tops: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    scores: list[Score] = field(default_factory=list)
    pooled: list[FloatArray] = field(default_factory=list)
    guesses: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """The step failed. The KV that it should have written does not exist.

    uids: the requests that fail; with AdapterLost, all of the adapter fail too. The scheduler
    computes the other requests again.
    """

    error: EngineError
    uids: tuple[int, ...]


StepOutcome = StepResult | StepFailed


class Flight(Protocol):
    """A launched step. If its plan has late rows, call `sample_late` before `wait`."""

    def sample_late(self, masks: Sequence[Mask]) -> None:
        """Enqueue the sampling of a step with late rows and return at once.

        Called once, after the step before it is committed and before the next launch. masks: one
        for each of the plan's `late_rows`.
        """
        raise AssertionError("this executor samples every row at launch")

    def wait(self) -> StepOutcome:
        """Block until the step's sampled ids are on the host. Called once."""
        ...


class Executor(Protocol):
    """Runs plans in the order in which they are launched."""

    def launch(self, plan: Plan) -> Flight:
        """Enqueue the step and return at once. If it has late rows, enqueue the forward pass only.

        In each layer, the KV of all rows is stored before a prompt row attends, so it may read
        pages that another row of the step writes.
        """
        ...
