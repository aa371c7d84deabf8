"""Log-probabilities of the prompt's own tokens.

A step with rows in `Plan.scored` needs the hidden states of more tokens than those that sample. It
runs without padding, outside of CUDA graphs. The LM head is applied to a bounded number of tokens
at a time, for which the memory plan has room, so the logits of a whole chunk never exist.

Axes: T tokens of the step, U of them that sample or are scored, S that sample, N that are scored,
R of these at a time, V vocabulary, D hidden size, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.core import Plan, StepResult
from minisgl.core.plan import Score

if TYPE_CHECKING:
    from minisgl.models import BaseLLMModel

LOGIT_BYTES = 2**26
"""The most bytes of float32 logits at a time: 110 rows of 152,000. The memory plan has room for
three times the logits of all running requests."""
MIN_ROWS = 16

Indices = npt.NDArray[np.int64]


def needed_tokens(plan: Plan) -> Indices:
    """Return the indices of the tokens that sample or are scored, int64 [U].

    They ascend, so if they are all tokens of the step, the model need not select tokens.
    """
    return np.sort(np.concatenate(_places(plan)))


def sample_and_score(
    model: BaseLLMModel,
    sample: Callable[[Tensor], Tensor],
    x_UD: Tensor,
    plan: Plan,
) -> Tensor:
    """Return one flat tensor: the output of `sample`, the bits of N log-probabilities, the
    ids of the most likely tokens, [N, K], and the bits of their log-probabilities."""
    sampled_S, scored_N = _places(plan)
    places_U = needed_tokens(plan)
    device = x_UD.device
    x_SD = x_UD[torch.from_numpy(np.searchsorted(places_U, sampled_S)).to(device)]
    values = [sample(x_SD).flatten()]
    rows_N = torch.from_numpy(np.searchsorted(places_U, scored_N)).to(device)
    next_ids = np.concatenate([each.next_ids for each in plan.scored]).astype(np.int64)
    next_N, num_top = torch.from_numpy(next_ids).to(device), _num_top(plan)
    num_rows = max(MIN_ROWS, LOGIT_BYTES // (4 * model.config.vocab_size))
    blocks = [
        _scores(model.logits(x_UD[rows_R]), next_R, num_top)
        for rows_R, next_R in zip(
            torch.split(rows_N, num_rows), torch.split(next_N, num_rows), strict=True
        )
    ]
    chosen, ids, tops = (torch.cat(parts).flatten() for parts in zip(*blocks, strict=True))
    return torch.cat([*values, chosen.view(torch.int32), ids, tops.view(torch.int32)])


def scored_result(
    plan: Plan, values: list[int], result: Callable[[Plan, list[int]], StepResult]
) -> StepResult:
    """Return the result of a step from the output of `sample_and_score`. result: the function that
    reads the part of the sampled rows."""
    counts, num_top = [len(each.next_ids) for each in plan.scored], _num_top(plan)
    num_scored = sum(counts)
    first = len(values) - num_scored * (1 + 2 * num_top)
    bits = np.array(values[first:], np.int32)
    logprobs: list[float] = bits[:num_scored].view(np.float32).tolist()
    ids_NK, top_bits_NK = bits[num_scored:].reshape(2, num_scored, num_top)
    tops_NK = top_bits_NK.view(np.float32)
    scores, start = [], 0
    for count, each in zip(counts, plan.scored, strict=True):
        span, asked = slice(start, start + count), each.num_top
        pairs = zip(ids_NK[span, :asked].tolist(), tops_NK[span, :asked].tolist(), strict=True)
        tops = [
            [pair for pair in zip(ids, values, strict=True) if pair[1] > -np.inf]
            for ids, values in pairs
        ]
        scores.append(Score(logprobs[span], tops))
        start += count
    return replace(result(replace(plan, scored=[]), values[:first]), scores=scores)


def _scores(logits_RV: Tensor, next_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [R] of the next ids, and ids and log-probabilities [R, K] of the
    most likely tokens. The same token has the same value in both."""
    x_RV = logits_RV
    sum_R1 = x_RV.logsumexp(-1, keepdim=True)
    if num_top > x_RV.shape[1]:
        x_RV = F.pad(x_RV, (0, num_top - x_RV.shape[1]), value=-torch.inf)
    top = x_RV.topk(num_top)
    chosen_R = x_RV.gather(1, next_R[:, None])[:, 0] - sum_R1[:, 0]
    return chosen_R, top.indices.int(), top.values - sum_R1


def _places(plan: Plan) -> tuple[Indices, Indices]:
    """Return the indices in the step of the tokens that sample, and of those that are scored."""
    lengths = np.array(plan.ends, np.int64) - np.array(plan.starts, np.int64)
    ends = np.cumsum(lengths)
    firsts: Sequence[int] = (ends - lengths).tolist()
    scored = [
        np.arange(firsts[each.row], firsts[each.row] + len(each.next_ids)) for each in plan.scored
    ]
    return ends[np.array(plan.sample_rows, np.int64)] - 1, np.concatenate(scored)


def _num_top(plan: Plan) -> int:
    return max(each.num_top for each in plan.scored)
