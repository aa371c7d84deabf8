"""How a plan becomes tensors: arrays on the host, one upload, tensors on the device.

A step with two rows: a decode at position 7, of a request whose pages are 5 and 9, and a prompt of
three tokens, whose page is 2. A page has 4 tokens::

    plan               row 0                row 1
    starts, ends       7, 8                 0, 3
    token_ids          PROMISED             11, 12, 13                    one for each token
    positions          7                    0, 1, 2
    slots              9*4 + 3              2*4 + 0, 2*4 + 1, 2*4 + 2     page * 4 + position % 4
    sample_positions   0                    3                             the row's last token

The runner can pad a step (`Runner.padded`), so that steps of many sizes share one CUDA graph::

    rows      |== decodes ==|- padding -|== chunks of prompts ==|- padding -|
    tokens    |== decodes ==|- padding -|==== chunks of prompts ====|--- padding ---|

A padding row among the decodes uses the last row of the request tables, which no request has. Its
slot is -1, so it stores no KV, and its sampled id is dropped. Padding rows among the prompts have
no tokens, and padding tokens after the prompts belong to no row.

The arrays come in two parts, for the forward pass and for sampling, because a step with late rows
samples later. Steps of one shape have arrays of the same sizes, so a captured graph finds them at
the same addresses.

Axes: T tokens, B rows, S rows that sample, N new pages, W words of 32 vocabulary ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minisgl.core import BatchSamplingArgs, Plan
from minisgl.core.batch_sampling import FILTERS, SAMPLING_COLUMNS
from minisgl.core.req import Mask
from minisgl.engine.device import StepSize
from minisgl.engine.prompt_scores import needed_tokens
from minisgl.engine.tables import RequestTables

Array = npt.NDArray[Any]

NO_SLOT = -1
"""The slot of a token whose KV is not stored."""
COLUMNS = frozenset((*SAMPLING_COLUMNS, "output_idxs"))
"""The arrays of `BatchSamplingArgs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Everything that decides which kernels a padded decode step launches.

    has_common_prefix: the step reads a common prefix once. has_drafts: it stores all keys and
    values before a row attends. samples: False if the step has late rows or options. Then its graph
    ends with the forward pass, and the fields after it are False. is_filtered: a row uses top-k,
    top-p or min-p. The shape of a padded step with prompts is its `StepSize`, since its graph never
    samples.
    """

    size: StepSize
    has_common_prefix: bool
    has_drafts: bool
    samples: bool
    all_greedy: bool
    is_filtered: bool
    has_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step's inputs: arrays on the host, then tensors on the device. `tensors` is filled by
    the uploads.

    padded, shape: None if the step is not padded. num_decodes: decode rows, padding included.
    has_options: a row has options that graphs do not support. Every rank then samples all rows,
    outside the graph and without padding.

    forward: the arrays of the forward pass, by name. token_ids: int32 [T]; `PROMISED` where only
    the tables have the id. slots: int32 [G, T], one row for each of G cache groups. positions:
    int32 [T]. rows: int32 [4, B], each row's table index, first token in the batch, number of
    tokens, and end position. sample_positions: int64, the indices of the tokens that sample; in a
    padded step arbitrary ones follow. common_prefix, key_ends: see `PoolBatch`; left out without.
    adapters: int32 [T], the slot of each token's adapter, 0 for none; left out if no token has one.

    sample: those of sampling. table_idxs: int64 [S], the table rows of the requests that sample.
    The columns of `BatchSamplingArgs` that the rows need. top_rows: int64, the rows that ask for
    the `Plan.num_top` most likely tokens; left out if none does.

    new_pages: int64 [3, N]: row of the page table, page index, page. It goes last in an upload,
    because its size is not part of the shape.
    tensors: what is on the device, by name; valid until the next upload. A step with late rows
    uploads twice: the second time `sample`, and the masks (`mask_arrays`).
    """

    plan: Plan
    padded: StepSize | None
    shape: StepShape | StepSize | None
    num_decodes: int
    has_options: bool
    forward: dict[str, Array]
    sample: dict[str, Array]
    new_pages: Array
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def num_samples(self) -> int:
        """S, padding included."""
        return len(self.sample["table_idxs"])

    def sampling_args(self) -> BatchSamplingArgs:
        """Return the sampling parameters of the S rows, on the device."""
        columns = {name: self.tensors[name] for name in self.sample if name in COLUMNS}
        return BatchSamplingArgs(all_greedy=not columns, **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Padding:
    """size: that of the step, padding included. at: where the padding rows among the decodes begin.
    count: their number; each has one token."""

    size: StepSize
    at: int
    count: int

    @classmethod
    def of(cls, plan: Plan, padded: StepSize | None) -> _Padding:
        at = plan.num_decodes
        size = padded or StepSize(at, plan.num_rows - at, plan.num_tokens - at)
        return cls(size=size, at=at, count=size.num_decodes - at)

    def fill(self, num: int, values: Sequence[int] | Array, decode: int, prompt: int) -> Array:
        """Return the values of rows or tokens, padded to int32 [num].

        decode, prompt: the padding values after the decodes and after the prompts.
        """
        filled = np.full(num, prompt, np.int32)
        end = self.at + self.count
        filled[: self.at] = values[: self.at]
        filled[self.at : end] = decode
        filled[end : len(values) + self.count] = values[self.at :]
        return filled


def make_inputs(
    plan: Plan, tables: RequestTables, page_size: int, padded: StepSize | None
) -> StepInputs:
    """Write the plan to the host copy of the tables and return the inputs of the step.

    padded: the size to pad the step to; None for no padding.
    """
    new_pages = tables.update(plan)
    padding = _Padding.of(plan, padded)
    size, num_in_rows = padding.size, plan.num_tokens + padding.count
    rows = _rows(plan, tables, padding)
    table_idxs, firsts, lengths, ends = rows
    positions = np.repeat(ends - lengths - firsts, lengths) + np.arange(num_in_rows, dtype=np.int32)
    sample_rows = np.array(plan.sample_rows, np.int64)
    sample_rows[sample_rows >= padding.at] += padding.count
    num_samples = len(sample_rows)
    # A padded step has positions for as many rows as requests can have. Further ones are arbitrary.
    most_rows = min(size.num_rows, tables.request_rows) if padded else num_samples
    sample_positions = np.arange(most_rows)
    sample_positions[:num_samples] = (firsts + lengths)[sample_rows] - 1
    forward: dict[str, Array] = {
        "token_ids": padding.fill(size.num_tokens, plan.token_ids, 0, 0),
        "positions": _pad(positions, size.num_tokens - num_in_rows, 0),
        "slots": _slots(plan, tables, page_size, padding, rows, positions),
        "rows": rows,
        "sample_positions": needed_tokens(plan) if plan.reports else sample_positions,
    }
    is_padded_decode = padded is not None and not size.num_prompts
    if is_padded_decode and (num_common := tables.common_tokens(plan, page_size)):
        forward["common_prefix"] = np.array([num_common], np.int32)
    if tables.has_slots and (slots := tables.adapter_slots(table_idxs)) is not None:
        forward["adapters"] = _pad(slots.repeat(lengths), size.num_tokens - num_in_rows, 0)
    has_options = bool(plan.top_rows or plan.option_rows or plan.reports)
    all_rows_sample = is_padded_decode and not has_options
    sample = _sample_arrays(
        plan, tables, table_idxs[sample_rows], size.num_rows if all_rows_sample else num_samples
    )
    samples = not plan.late_rows and not has_options
    shape = StepShape(
        size=size,
        has_common_prefix="common_prefix" in forward,
        has_drafts=plan.num_drafts > 0,
        samples=samples,
        all_greedy=samples and COLUMNS.isdisjoint(sample),
        is_filtered=samples and not FILTERS.isdisjoint(sample),
        has_logprobs=samples and bool(plan.logprob_rows),
    )
    return StepInputs(
        plan=plan,
        padded=padded,
        shape=shape if is_padded_decode else padded,
        num_decodes=size.num_decodes,
        has_options=has_options,
        forward=forward,
        sample=sample,
        new_pages=_pad_pages(new_pages, tables) if padded else new_pages,
    )


def _rows(plan: Plan, tables: RequestTables, padding: _Padding) -> Array:
    """Return `rows` of `StepInputs`."""
    num_rows = padding.size.num_rows
    starts = padding.fill(num_rows, plan.starts, 0, 0)
    ends = padding.fill(num_rows, plan.ends, 1, 0)
    table_idxs = padding.fill(num_rows, plan.table_idxs, tables.padding_idx, tables.padding_idx)
    lengths = ends - starts
    firsts = np.cumsum(lengths, dtype=np.int32) - lengths
    return np.stack((table_idxs, firsts, lengths, ends))


def _slots(
    plan: Plan,
    tables: RequestTables,
    page_size: int,
    padding: _Padding,
    rows: Array,
    positions: Array,
) -> Array:
    """Return `slots` of `StepInputs`. positions: of the tokens that belong to a row."""
    table_idxs, firsts, lengths, _ = rows
    rows_T = np.repeat(table_idxs, lengths)
    slots = np.full((len(tables.groups), padding.size.num_tokens), NO_SLOT, np.int32)
    for group in range(len(tables.groups)):
        slots[group, : len(positions)] = tables.slots(rows_T, positions, page_size, group)
    slots[:, padding.at : padding.at + padding.count] = NO_SLOT
    for row, end in plan.stored:  # only prompt rows, which follow the padding decodes
        first = firsts[row + padding.count]
        num_stored = min(end, plan.ends[row]) - plan.starts[row]
        slots[0, first : first + num_stored] = NO_SLOT
    return slots


def _sample_arrays(
    plan: Plan, tables: RequestTables, table_idxs: Array, num_rows: int
) -> dict[str, Array]:
    """Return `sample` of `StepInputs` for `num_rows` rows.

    table_idxs: of the rows that sample; padding rows follow.
    """
    padding = num_rows - len(table_idxs)
    padded_idxs = _pad(table_idxs.astype(np.int64), padding, tables.padding_idx)
    sample: dict[str, Array] = {"table_idxs": padded_idxs, **tables.sampling_columns(padded_idxs)}
    if len(sample) > 1:
        sample["output_idxs"] = _pad(np.array(plan.output_idxs, np.int64), padding, 0)
    if plan.top_rows:
        sample["top_rows"] = np.array(plan.top_rows, np.int64)
    return sample


def _pad_pages(new_pages: Array, tables: RequestTables) -> Array:
    """Pad [3, N] to a power of two, so that uploads have few layouts. Padding writes the table row
    of padding rows."""
    count = new_pages.shape[1]
    padding = np.array([[tables.padding_idx], [0], [0]])
    more = (1 << (count - 1).bit_length()) - count if count else 0
    return np.concatenate((new_pages, padding.repeat(more, axis=1)), axis=1)


def mask_arrays(late_rows: Sequence[int], masks: Sequence[Mask], rows: range) -> dict[str, Array]:
    """Return the masks of the late rows that this rank samples, by name.

    rows: the rows that this rank samples. mask_rows: int64 [M], indices into `rows`. masks: int32
    [M, W]. Returns neither if this rank samples no late row.
    """
    here = [(row, mask) for row, mask in zip(late_rows, masks, strict=True) if row in rows]
    if not here:
        return {}
    return {
        "mask_rows": np.array([row - rows.start for row, _ in here], np.int64),
        "masks": np.stack([mask for _, mask in here]).view(np.int32),
    }


def _pad(array: Array, count: int, value: int) -> Array:
    return np.concatenate((array, np.full(count, value, array.dtype))) if count else array
