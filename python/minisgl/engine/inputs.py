"""How a plan becomes tensors: arrays on the host, one upload, named tensors on the device.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minisgl.core import BatchSamplingArgs, Plan
from minisgl.core.batch_sampling import SAMPLING_COLUMNS
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

    has_common_prefix: the step reads a common prefix once. samples: False if the step has late rows
    or options. Then its graph ends with the forward pass, and the fields after it are False.
    is_filtered: a row uses top-k, top-p or min-p. The shape of a padded step with prompts is its
    `StepSize`, since its graph never samples.
    """

    size: StepSize
    has_common_prefix: bool
    samples: bool
    all_greedy: bool
    is_filtered: bool
    has_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """A plan as arrays on the host. padded, shape: None if the step is not padded.

    has_options: a row has options that graphs do not support. Every rank then samples all
    rows, outside the graph and without padding. num_top: see `Plan`.

    forward, sample: arrays by name, for `ForwardTensors` and `SampleTensors`. new_pages: int64
    [3, N]: row of the page table, page index, page. It goes last in an upload, because its size is
    not part of the shape.
    """

    padded: StepSize | None
    shape: StepShape | StepSize | None
    num_decodes: int
    has_logprobs: bool
    has_options: bool
    num_top: int
    forward: dict[str, Array]
    sample: dict[str, Array]
    new_pages: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTensors:
    """The inputs of the forward pass.

    token_ids: int32 [T]; `PROMISED` where only the tables have the id. slots: int32 [G, T], one row
    for each of G cache groups. positions: int32 [T]. rows: int32 [4, B], each row's table index,
    first token in the batch, number of tokens, and end position. common_prefix: see `PoolBatch`.
    sample_positions: int64, the indices of the tokens that sample; in a padded step arbitrary ones
    follow.
    """

    num_decodes: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    sample_positions: Tensor
    common_prefix: Tensor | None = None

    @classmethod
    def of(cls, step: StepArrays, tensors: Mapping[str, Tensor]) -> ForwardTensors:
        """tensors: the arrays of `step` on the device, by name."""
        return cls(num_decodes=step.num_decodes, **{name: tensors[name] for name in step.forward})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTensors:
    """The inputs of sampling.

    table_idxs: int64 [S], the table rows of the requests that sample. has_options: see
    `StepArrays`. top_rows: int64, the rows that ask for the `num_top` most likely tokens.
    mask_rows, masks: see `mask_arrays`; None if no row has a mask.
    """

    table_idxs: Tensor
    args: BatchSamplingArgs
    has_logprobs: bool
    has_options: bool = False
    num_top: int = 0
    top_rows: Tensor | None = None
    mask_rows: Tensor | None = None
    masks: Tensor | None = None

    @classmethod
    def of(cls, step: StepArrays, tensors: Mapping[str, Tensor]) -> SampleTensors:
        """tensors: the arrays of `step` on the device, by name."""
        columns = {name: tensors[name] for name in step.sample if name in COLUMNS}
        return cls(
            table_idxs=tensors["table_idxs"],
            args=BatchSamplingArgs(all_greedy=not columns, **columns),
            has_logprobs=step.has_logprobs,
            has_options=step.has_options,
            num_top=step.num_top,
            top_rows=tensors.get("top_rows"),
            mask_rows=tensors.get("mask_rows"),
            masks=tensors.get("masks"),
        )


def make_arrays(
    plan: Plan, tables: RequestTables, page_size: int, padded: StepSize | None
) -> StepArrays:
    """Write the plan to the host copy of the tables and return the arrays of the step.

    padded: the size to pad the step to; None for no padding.
    """
    new_pages = tables.update(plan)
    num_decodes, num_tokens = plan.num_decodes, plan.num_tokens
    exact = StepSize(num_decodes, plan.num_rows - num_decodes, num_tokens - num_decodes)
    size = padded or exact
    padding = size.num_decodes - num_decodes  # rows among the decodes, one token each
    num_in_rows = num_tokens + padding  # tokens that belong to a row

    def fill(count: int, values: Sequence[int] | Array, decode: int, prompt: int) -> Array:
        """Return the values of rows or tokens, padded to int32 [count].

        decode, prompt: the padding values after the decodes and after the prompts.
        """
        filled = np.full(count, prompt, np.int32)
        filled[:num_decodes] = values[:num_decodes]
        filled[num_decodes : num_decodes + padding] = decode
        filled[num_decodes + padding : len(values) + padding] = values[num_decodes:]
        return filled

    starts = fill(size.num_rows, plan.starts, 0, 0)
    ends = fill(size.num_rows, plan.ends, 1, 0)
    table_idxs = fill(size.num_rows, plan.table_idxs, tables.padding_idx, tables.padding_idx)
    lengths = ends - starts
    ends_in_batch = np.cumsum(lengths, dtype=np.int32)
    firsts = ends_in_batch - lengths
    positions = np.repeat(starts - firsts, lengths) + np.arange(num_in_rows, dtype=np.int32)
    rows_T = np.repeat(table_idxs, lengths)
    slots = np.full((len(tables.groups), size.num_tokens), NO_SLOT, np.int32)
    for group in range(len(tables.groups)):
        slots[group, :num_in_rows] = tables.slots(rows_T, positions, page_size, group)
    slots[:, num_decodes : num_decodes + padding] = NO_SLOT
    for row, end in plan.stored:  # only prompt rows, which follow the padding decodes
        first = firsts[row + padding]
        num_stored = min(end, plan.ends[row]) - plan.starts[row]
        slots[0, first : first + num_stored] = NO_SLOT
    token_ids = fill(size.num_tokens, plan.token_ids, 0, 0)
    is_padded_decode = padded is not None and not size.num_prompts
    num_samples = len(plan.sample_rows)
    sample_rows = np.array(plan.sample_rows, np.int64)
    sample_rows[sample_rows >= num_decodes] += padding
    # A padded step has positions for as many rows as requests can have. Further ones are arbitrary.
    most_rows = min(size.num_rows, tables.request_rows) if padded else num_samples
    sample_positions = np.arange(most_rows)
    sample_positions[:num_samples] = ends_in_batch[sample_rows] - 1
    has_options = bool(plan.top_rows or plan.option_rows or plan.scored)
    num_common = tables.common_tokens(plan, page_size) if is_padded_decode else 0
    forward: dict[str, Array] = {
        "token_ids": token_ids,
        "positions": _pad(positions, size.num_tokens - num_in_rows, 0),
        "slots": slots,
        "rows": np.stack((table_idxs, firsts, lengths, ends)),
        "sample_positions": sample_positions,
    }
    if num_common:
        forward["common_prefix"] = np.array([num_common], np.int32)
    all_rows_sample = is_padded_decode and not has_options
    sample, is_filtered = _sample_arrays(
        plan, tables, table_idxs[sample_rows], size.num_rows if all_rows_sample else num_samples
    )
    samples = not plan.late_rows and not has_options
    has_logprobs = bool(plan.logprob_rows)
    shape = StepShape(
        size=size,
        has_common_prefix=num_common > 0,
        samples=samples,
        all_greedy=samples and COLUMNS.isdisjoint(sample),
        is_filtered=samples and is_filtered,
        has_logprobs=samples and has_logprobs,
    )
    if plan.scored:
        forward["sample_positions"] = needed_tokens(plan)
    return StepArrays(
        padded=padded,
        shape=shape if is_padded_decode else padded,
        num_decodes=size.num_decodes,
        has_logprobs=has_logprobs,
        has_options=has_options,
        num_top=plan.num_top,
        forward=forward,
        sample=sample,
        new_pages=(_pad_pages(new_pages, tables) if padded else new_pages).T,
    )


def _sample_arrays(
    plan: Plan, tables: RequestTables, table_idxs: Array, num_rows: int
) -> tuple[dict[str, Array], bool]:
    """Return the arrays for sampling by name, for `num_rows` rows, and whether a row has filters.

    table_idxs: of the rows that sample; padding rows follow.
    """
    padding = num_rows - len(table_idxs)
    padded_idxs = _pad(table_idxs.astype(np.int64), padding, tables.padding_idx)
    columns, is_filtered = tables.sampling_columns(padded_idxs)
    if columns:
        columns["output_idxs"] = _pad(np.array(plan.output_idxs, np.int64), padding, 0)
    sample: dict[str, Array] = {"table_idxs": padded_idxs, **columns}
    if plan.top_rows:
        sample["top_rows"] = np.array(plan.top_rows, np.int64)
    return sample, is_filtered


def _pad_pages(new_pages: Array, tables: RequestTables) -> Array:
    """Pad [N, 3] to a power of two, so that uploads have few layouts. Padding writes the table row
    of padding rows."""
    count = len(new_pages)
    padding = np.array([(tables.padding_idx, 0, 0)])
    more = (1 << (count - 1).bit_length()) - count if count else 0
    return np.concatenate((new_pages, padding.repeat(more, axis=0)))


def mask_arrays(late_rows: Sequence[int], masks: Sequence[Mask], rows: range) -> dict[str, Array]:
    """Return the masks of the late rows that this rank samples, by name for `SampleTensors`.

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
