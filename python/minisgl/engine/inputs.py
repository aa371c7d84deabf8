"""A plan as arrays for one upload, and what they are once they are on the device.

A step that only decodes can be padded to a number of rows, so that steps of many sizes share one
shape (and one captured graph). A padding row is a request that is not there: it owns a row of the
tables, its slot is -1, so nothing is stored, and what it samples is dropped::

    rows      |== decodes ==|- padding -|                 padded: only steps that just decode
    rows      |== decodes ==|==== chunks of prompts ====|

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
from minisgl.engine.tables import RequestTables

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """All that a padded step's work depends on besides the values in its arrays."""

    num_rows: int
    is_shared: bool
    all_greedy: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """shape: of a padded step; None where the step is not padded. arrays: for `StepTensors.of`."""

    shape: StepShape | None
    num_decodes: int
    arrays: list[Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """token_ids: int32 [T], `PROMISED` where the host does not know. rows: see `Batch.rows`.
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

    @classmethod
    def of(cls, step: StepArrays, tensors: Sequence[Tensor]) -> StepTensors:
        """`tensors` are `step.arrays` on the device."""
        token_ids, positions, slots, rows, sample_positions, sample_table_idxs = tensors[:6]
        new_pages, shared = tensors[6:8]
        sampling = BatchSamplingArgs(all_greedy=True)
        if len(tensors) > 8:
            temperatures, top_ks, top_ps, min_ps, seeds, output_idxs = tensors[8:]
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
        )


def make_arrays(
    plan: Plan, tables: RequestTables, page_size: int, num_padded_rows: int | None
) -> StepArrays:
    """Takes the plan into the tables' host side. num_padded_rows: None leaves the step as it is."""
    new_pages = tables.update(plan)
    starts = np.array(plan.starts, np.int32)
    ends = np.array(plan.ends, np.int32)
    table_idxs = np.array(plan.table_idxs, np.int64)
    output_idxs = np.array(plan.output_idxs, np.int64)
    if num_padded_rows is None:
        lengths = ends - starts
        ends_in_batch = np.cumsum(lengths, dtype=np.int64)
        firsts = ends_in_batch - lengths
        positions = np.repeat(starts - firsts, lengths)
        positions = (positions + np.arange(plan.num_tokens)).astype(np.int32)
        slots = tables.slots(np.repeat(table_idxs, lengths), positions, page_size)
        sample_positions = ends_in_batch[plan.sample_rows] - 1
        sample_table_idxs = table_idxs[plan.sample_rows]
        token_ids = plan.token_ids
        num_decodes = plan.num_decodes
    else:
        extra = num_padded_rows - plan.num_rows
        positions = _pad(starts, extra, 0)
        slots = _pad(tables.slots(table_idxs, starts, page_size), extra, -1)
        token_ids = _pad(plan.token_ids, extra, 0)
        ends = _pad(ends, extra, 1)
        sample_table_idxs = table_idxs = _pad(table_idxs, extra, tables.padding_idx)
        output_idxs = _pad(output_idxs, extra, 0)
        firsts = sample_positions = np.arange(num_padded_rows)
        lengths = np.ones(num_padded_rows, np.int32)
        assert len(new_pages) <= num_padded_rows, "a decode row takes one page at most"
        padding = np.array([(tables.padding_idx, 0, 0)], np.int64)
        padding = padding.repeat(num_padded_rows - len(new_pages), axis=0)
        new_pages = np.concatenate((new_pages, padding))
        num_decodes = num_padded_rows
    shared = tables.shared_tokens(plan, page_size) if num_padded_rows else 0
    temperature, top_k, top_p, min_p, seed = tables.sampling(sample_table_idxs)
    draws = bool(temperature.any())
    shape = StepShape(
        num_rows=len(table_idxs),
        is_shared=shared > 0,
        all_greedy=not draws,
        has_top_k=draws and bool(top_k.any()),
        has_top_p=draws and bool((top_p < 1).any()),
        has_min_p=draws and bool(min_p.any()),
    )
    arrays: list[Array] = [
        token_ids,
        positions,
        slots,
        np.stack((table_idxs, firsts, lengths, ends)).astype(np.int32),
        sample_positions,
        sample_table_idxs,
        new_pages.T,
        np.array([shared] if shared else [], np.int32),
    ]
    if not shape.all_greedy:  # a filter that no row uses is left out
        arrays += [
            temperature,
            top_k if shape.has_top_k else top_k[:0],
            top_p if shape.has_top_p else top_p[:0],
            min_p if shape.has_min_p else min_p[:0],
            seed,
            output_idxs,
        ]
    return StepArrays(
        shape=None if num_padded_rows is None else shape, num_decodes=num_decodes, arrays=arrays
    )


def _pad(array: Array, count: int, value: int) -> Array:
    return np.concatenate((array, np.full(count, value, array.dtype))) if count else array
