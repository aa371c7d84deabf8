"""The sampling parameters of a step's rows, on the host and on the device.

A parameter is a line of `SAMPLING_COLUMNS` and a field of `BatchSamplingArgs`. The request tables,
the arrays of a step, their upload and the device tensors follow from these. docs/extending.md lists
the other places that a new parameter touches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minisgl.core.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

LEAST_TOP_P: Final = float(np.finfo(np.float32).tiny)
"""A smaller top-p would be 0 in float32 and keep no token."""


@dataclass(frozen=True, slots=True)
class SamplingColumn:
    """How a parameter is kept in the request tables."""

    dtype: type[np.number[Any]]
    neutral: float  # the value without effect, which greedy rows and padding rows have
    value: Callable[[SamplingParams], float]  # the parameter of a request that draws
    is_filter: bool = False
    """The device needs the column only in steps with a row whose filters have an effect."""


SAMPLING_COLUMNS: Final[Mapping[str, SamplingColumn]] = {
    "temperatures": SamplingColumn(np.float32, 0, lambda params: params.temperature),
    "top_ks": SamplingColumn(np.int32, 0, lambda params: params.top_k, is_filter=True),
    "top_ps": SamplingColumn(
        np.float32, 1, lambda params: max(params.top_p, LEAST_TOP_P), is_filter=True
    ),
    "min_ps": SamplingColumn(np.float32, 0, lambda params: params.min_p, is_filter=True),
    "seeds": SamplingColumn(np.int64, 0, lambda params: _signed(params.seed or 0)),
}
FILTERS: Final = frozenset(name for name, each in SAMPLING_COLUMNS.items() if each.is_filter)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSamplingArgs:
    """The sampling parameters of S rows on the device: one tensor [S] per parameter, None in steps
    that do not need it."""

    all_greedy: bool  # no row draws; every tensor is None
    temperatures: Tensor | None = None  # 0 is greedy
    top_ks: Tensor | None = None  # 0 keeps all tokens
    top_ps: Tensor | None = None
    min_ps: Tensor | None = None
    seeds: Tensor | None = None  # the 64 bits of the seed
    output_idxs: Tensor | None = None  # int64, the index of the output token

    def take(self, rows: range) -> BatchSamplingArgs:
        """Return the arguments of consecutive rows, as views."""
        tensors = {name: getattr(self, name) for name in (*SAMPLING_COLUMNS, "output_idxs")}
        span = slice(rows.start, rows.stop)
        return replace(
            self, **{name: x_S[span] for name, x_S in tensors.items() if x_S is not None}
        )


def sampling_row(params: SamplingParams) -> tuple[float, ...]:
    """Return the values of a request in the order of `SAMPLING_COLUMNS`.

    A greedy request has neutral values: it draws no noise and ignores the filters. A top-k of 1 is
    greedy.
    """
    is_greedy = params.temperature == 0 or params.top_k == 1
    return tuple(
        each.neutral if is_greedy else each.value(params) for each in SAMPLING_COLUMNS.values()
    )


def _signed(seed: int) -> int:
    """Return the 64 bits of an integer from -2**63 to 2**64 - 1, read as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63
