"""Contexts of several rows side by side, for kernels that do not read the paged cache.

Axes: E rows, C tokens of all their contexts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split_rows(ends: Sequence[int], most: int) -> list[slice]:
    """Split rows, in order, into runs whose contexts have at most `most` tokens together. A context
    that is longer gets its own run. ends: the lengths of the contexts."""
    runs: list[slice] = []
    first = num_tokens = 0
    for row, end in enumerate(ends):
        if row > first and num_tokens + end > most:
            runs.append(slice(first, row))
            first, num_tokens = row, 0
        num_tokens += end
    if first < len(ends):
        runs.append(slice(first, len(ends)))
    return runs


def context_slots(
    page_table: Tensor, table_idxs_E: Tensor, ends_E: Tensor, num_tokens: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Return the slots of the contexts [0, ends), row after row, int64 [C], and the index where
    each row begins among them and the last ends, int32 [E + 1].

    page_table: int32 [rows, pages]. num_tokens: C, the sum of `ends_E`; the host knows it, so
    nothing waits for the device.
    """
    rows_C = torch.repeat_interleave(ends_E, output_size=num_tokens)
    firsts = torch.nn.functional.pad(ends_E.cumsum(0, dtype=torch.int32), (1, 0))
    positions_C = torch.arange(num_tokens, device=ends_E.device) - firsts[rows_C]
    pages_C = page_table[table_idxs_E[rows_C], positions_C // page_size]
    return pages_C * page_size + positions_C % page_size, firsts
