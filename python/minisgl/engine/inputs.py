"""A plan as arrays for one upload, and what they are once they are on the device.

A step can be padded, so that steps of many sizes share one shape (and one captured graph)::

    rows      |== decodes ==|- padding -|== chunks of prompts ==|- padding -|
    tokens    |== decodes ==|- padding -|==== chunks of prompts ====|--- padding ---|

Decode rows are padded with requests that are not there: they own a row of the tables, their slots
are -1, so nothing is stored, and what they sample is dropped. Chunks are padded with rows of no
tokens, and behind them with tokens of no row.

Axes: T tokens, B rows, S rows that sample, N new pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minisgl.core import BatchSamplingArgs, Plan
from minisgl.engine.device import StepSize
from minisgl.engine.tables import RequestTables

Array = npt.NDArray[Any]

NO_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """All that the work of a padded step without prompts depends on besides the values in its
    arrays. With prompts, that is its size: what it samples is not part of the graph."""

    size: StepSize
    is_shared: bool
    all_greedy: bool
    is_filtered: bool
    has_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """shape: of a padded step; None where the step is not padded. arrays: for `StepTensors.of`."""

    shape: StepShape | StepSize | None
    num_decodes: int
    arrays: list[Array]
    has_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """token_ids: int32 [T], `PROMISED` where the host does not know. rows: see `Batch.rows`.
    sample_positions: int64, of S tokens, and in a padded step with prompts of more behind them.
    sample_table_idxs: int64 [S]. new_pages: int64 [3, N], table row, index in it and page.
    shared: see `Batch.shared`.
    """

    num_decodes: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    sample_positions: Tensor
    sample_table_idxs: Tensor
    new_pages: Tensor
    shared: Tensor | None
    sampling: BatchSamplingArgs
    has_logprobs: bool

    @classmethod
    def of(cls, step: StepArrays, tensors: Sequence[Tensor]) -> StepTensors:
        """`tensors` are `step.arrays` on the device."""
        token_ids, positions, slots, rows, sample_positions, sample_table_idxs = tensors[:6]
        shared, *drawing, new_pages = tensors[6:]
        sampling = BatchSamplingArgs(all_greedy=True)
        if drawing:
            temperatures, top_ks, top_ps, min_ps, seeds, output_idxs = drawing
            sampling = BatchSamplingArgs(
                all_greedy=False,
                temperatures=temperatures,
                top_ks=top_ks if len(top_ks) else None,
                top_ps=top_ps if len(top_ps) else None,
                min_ps=min_ps if len(min_ps) else None,
                seeds=seeds,
                output_idxs=output_idxs,
            )
        return cls(
            num_decodes=step.num_decodes,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            rows=rows,
            sample_positions=sample_positions,
            sample_table_idxs=sample_table_idxs,
            new_pages=new_pages,
            shared=shared if len(shared) else None,
            sampling=sampling,
            has_logprobs=step.has_logprobs,
        )


def make_arrays(
    plan: Plan, tables: RequestTables, page_size: int, padded: StepSize | None
) -> StepArrays:
    """Takes the plan into the tables' host side. padded: None leaves the step as it is."""
    new_pages = tables.update(plan)
    num_decodes, num_tokens = plan.num_decodes, plan.num_tokens
    exact = StepSize(num_decodes, plan.num_rows - num_decodes, num_tokens - num_decodes)
    size = padded or exact
    extra = size.num_decodes - num_decodes  # rows that decode for nobody, of a token each
    num_kept = num_tokens + extra  # tokens that belong to a row

    def fill(count: int, values: Sequence[int] | Array, decode: int, prompt: int) -> Array:
        """int32 [count]: `values` of rows or of tokens, with `decode` for what pads the decode
        rows, and `prompt` for what pads the others."""
        filled = np.full(count, prompt, np.int32)
        filled[:num_decodes] = values[:num_decodes]
        filled[num_decodes : num_decodes + extra] = decode
        filled[num_decodes + extra : len(values) + extra] = values[num_decodes:]
        return filled

    starts = fill(size.num_rows, plan.starts, 0, 0)
    ends = fill(size.num_rows, plan.ends, 1, 0)
    table_idxs = fill(size.num_rows, plan.table_idxs, tables.padding_idx, tables.padding_idx)
    lengths = ends - starts
    ends_in_batch = np.cumsum(lengths, dtype=np.int32)
    firsts = ends_in_batch - lengths
    positions = np.repeat(starts - firsts, lengths) + np.arange(num_kept, dtype=np.int32)
    slots = tables.slots(np.repeat(table_idxs, lengths), positions, page_size)
    slots[num_decodes : num_decodes + extra] = NO_SLOT
    token_ids = fill(size.num_tokens, plan.token_ids, 0, 0)
    decodes_alone = padded is not None and not size.num_prompts
    num_samples = len(plan.sample_rows)
    sample_rows = np.array(plan.sample_rows, np.int64)
    sample_rows[sample_rows >= num_decodes] += extra
    # What pads them are other tokens of the step.
    sample_positions = np.arange(min(size.num_rows, tables.padding_idx) if padded else num_samples)
    sample_positions[:num_samples] = ends_in_batch[sample_rows] - 1
    num_extra = size.num_rows - num_samples if decodes_alone else 0
    sample_table_idxs = _pad(
        table_idxs[sample_rows].astype(np.int64), num_extra, tables.padding_idx
    )
    output_idxs = _pad(np.array(plan.output_idxs, np.int64), num_extra, 0)
    if padded and len(new_pages):
        padding = np.array([(tables.padding_idx, 0, 0)])
        count = (1 << (len(new_pages) - 1).bit_length()) - len(new_pages)
        new_pages = np.concatenate((new_pages, padding.repeat(count, axis=0)))
    shared = tables.shared_tokens(plan, page_size) if decodes_alone else 0
    temperature, top_k, top_p, min_p, seed = tables.sampling(sample_table_idxs)
    draws = bool(temperature.any())
    shape = StepShape(
        size=size,
        is_shared=shared > 0,
        all_greedy=not draws,
        is_filtered=draws and bool(top_k.any() or (top_p < 1).any() or min_p.any()),
        has_logprobs=bool(plan.logprob_rows),
    )
    # First what a graph of prompts reads, which thus is where it was; the last is no graph's.
    arrays: list[Array] = [
        token_ids,
        _pad(positions, size.num_tokens - num_kept, 0),
        _pad(slots, size.num_tokens - num_kept, NO_SLOT),
        np.stack((table_idxs, firsts, lengths, ends)),
        sample_positions,
        sample_table_idxs,
        np.array([shared] if shared else [], np.int32),
    ]
    if not shape.all_greedy:
        filters = [top_k, top_p, min_p]
        if not shape.is_filtered:
            filters = [array[:0] for array in filters]
        arrays += [temperature, *filters, seed, output_idxs]
    arrays.append(new_pages.T)
    return StepArrays(
        shape=shape if decodes_alone else padded,
        num_decodes=size.num_decodes,
        arrays=arrays,
        has_logprobs=shape.has_logprobs,
    )


def _pad(array: Array, count: int, value: int) -> Array:
    return np.concatenate((array, np.full(count, value, array.dtype))) if count else array
