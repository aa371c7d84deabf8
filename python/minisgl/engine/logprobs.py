"""The log-probabilities of sampled tokens, for requests that ask for them.

Axes: S rows that sample, R those of this rank, V vocabulary, M rows that ask for the K most likely
tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Plan, StepResult
from minisgl.core.req import IdArray
from minisgl.engine.inputs import StepInputs
from minisgl.kernel.ops import Ops


def with_logprobs(
    ops: Ops,
    ids_S: Tensor,
    known_R: Tensor,
    logits_RV: Tensor,
    inputs: StepInputs,
    gather: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return int32 [2, S]: the ids, and the bits of the float32 log-probabilities of `known_R`. If
    rows ask for the most likely tokens, return these values flat, and then the ids and the bits of
    the log-probabilities of these tokens, [M, K] each.

    gather: joins the rows of all ranks; None if this rank has all rows.
    """
    logprobs_R = ops.logprobs(logits_RV, known_R).view(torch.int32)
    logprobs_S = gather(logprobs_R) if gather else logprobs_R
    if not inputs.plan.top_rows:
        return torch.stack((ids_S, logprobs_S))
    top_ids_MK, top_MK = ops.top_logprobs(logits_RV[inputs["top_rows"]], inputs.plan.num_top)
    parts = (ids_S, logprobs_S, top_ids_MK.flatten(), top_MK.view(torch.int32).flatten())
    return torch.cat(parts)


def result_with_logprobs(plan: Plan, values: IdArray) -> StepResult:
    """Return the result of a step from the output of `with_logprobs`, on the host."""
    num_samples = len(plan.sample_rows)
    logprobs = values[num_samples : 2 * num_samples].view(np.float32).tolist()
    return StepResult(
        next_ids=values[:num_samples].tolist(),
        logprobs={index: logprobs[index] for index in plan.logprob_rows},
        tops=_tops(plan.top_rows, values[2 * num_samples :]) if plan.top_rows else {},
    )


def _tops(rows: list[int], values: IdArray) -> dict[int, list[tuple[int, float]]]:
    num_top, half = len(values) // (2 * len(rows)), len(values) // 2
    tops: list[float] = values[half:].view(np.float32).tolist()
    pairs = list(zip(values[:half].tolist(), tops, strict=True))
    return {row: pairs[i * num_top : (i + 1) * num_top] for i, row in enumerate(rows)}
