"""What a step reports of its prompts: log-probabilities of their own tokens, or pooled rows.

A step with rows in `Plan.scored` or `Plan.pooled` needs the hidden states of more tokens than those
that sample. It runs without padding, outside of CUDA graphs. The LM head is applied to a bounded
number of tokens at a time, for which the memory plan has room, so the logits of a whole chunk never
exist. It is not applied to a step all of whose sampling rows are pooled: their ids are 0, and
nobody reads them.

Axes: T tokens of the step, U of them that sample, are scored or pooled, S that sample, N that are
scored, R of these at a time, V vocabulary, D hidden size, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.core import Plan, StepResult
from minisgl.core.plan import Pooled, Score, Scored
from minisgl.core.req import FloatArray, IdArray

if TYPE_CHECKING:
    from minisgl.models import BaseLLMModel

LOGIT_BYTES = 2**26
"""The most bytes of float32 logits at a time: 110 rows of 152,000. The memory plan has room for
three times the logits of all running requests."""
MIN_ROWS = 16

Indices = npt.NDArray[np.int64]


class PoolRows(Protocol):
    """Pools hidden states (the row `pooling`: `rows`)."""

    def __call__(
        self, model: BaseLLMModel, x_UD: Tensor, spans: Sequence[tuple[int, Pooled]]
    ) -> list[Tensor]:
        """Return what each row yields, float32 [D], or [L] for L logits.

        x_UD: hidden states after the last norm. spans: where the tokens of a row begin in them.
        """


def needed_tokens(plan: Plan) -> Indices:
    """Return the indices of the tokens that sample, are scored or pooled, int64 [U].

    They ascend, so if they are all tokens of the step, the model need not select tokens.
    """
    return np.unique(np.concatenate([_sampled(plan), *_spans(plan, [*plan.scored, *plan.pooled])]))


def sample_and_report(
    model: BaseLLMModel,
    sample: Callable[[Tensor], Tensor],
    pool: PoolRows | None,
    x_UD: Tensor,
    plan: Plan,
) -> Tensor:
    """Return one flat tensor: the output of `sample`; the bits of N log-probabilities, the ids of
    the most likely tokens, [N, K], and the bits of their log-probabilities; the bits of the pooled
    rows, and D. A part without rows is left out."""
    places_U = needed_tokens(plan)

    def rows_of(places: Indices) -> Tensor:
        return torch.from_numpy(np.searchsorted(places_U, places)).to(x_UD.device)

    if {each.row for each in plan.pooled}.issuperset(plan.sample_rows):
        values = [torch.zeros(len(plan.sample_rows), dtype=torch.int32, device=x_UD.device)]
    else:
        values = [sample(x_UD[rows_of(_sampled(plan))]).flatten()]
    if plan.scored:
        rows_N = rows_of(np.concatenate(_spans(plan, plan.scored)))
        next_ids = np.concatenate([each.next_ids for each in plan.scored]).astype(np.int64)
        next_N, num_top = torch.from_numpy(next_ids).to(x_UD.device), _num_top(plan)
        num_rows = max(MIN_ROWS, LOGIT_BYTES // (4 * model.config.vocab_size))
        blocks = [
            _scores(model.logits(x_UD[rows_R]), next_R, num_top)
            for rows_R, next_R in zip(
                torch.split(rows_N, num_rows), torch.split(next_N, num_rows), strict=True
            )
        ]
        chosen, ids, tops = (torch.cat(parts).flatten() for parts in zip(*blocks, strict=True))
        values += [chosen.view(torch.int32), ids, tops.view(torch.int32)]
    if plan.pooled:
        assert pool, "the request was checked by the package that pools"
        firsts = [int(np.searchsorted(places_U, span[0])) for span in _spans(plan, plan.pooled)]
        spans = list(zip(firsts, plan.pooled, strict=True))
        values += [row.view(torch.int32) for row in pool(model, x_UD, spans)]
        values.append(values[0].new_full((1,), x_UD.shape[1]))
    return torch.cat(values)


def reported_result(
    plan: Plan, values: IdArray, result: Callable[[Plan, IdArray], StepResult]
) -> StepResult:
    """Return the result of a step from the output of `sample_and_report`. result: the function that
    reads the part of the sampled rows."""
    pooled: list[FloatArray] = []
    if plan.pooled:
        sizes = [len(each.logit_ids) or int(values[-1]) for each in plan.pooled]
        first = len(values) - 1 - sum(sizes)
        pooled = np.split(values[first:-1].view(np.float32), np.cumsum(sizes)[:-1])
        values = values[:first]
    scores, values = _read_scores(plan, values) if plan.scored else ([], values)
    rest = result(replace(plan, scored=[], pooled=[]), values)
    return replace(rest, scores=scores, pooled=pooled)


def _read_scores(plan: Plan, values: IdArray) -> tuple[list[Score], IdArray]:
    """Return the scores, and the values before them."""
    counts, num_top = [len(each.next_ids) for each in plan.scored], _num_top(plan)
    num_scored = sum(counts)
    first = len(values) - num_scored * (1 + 2 * num_top)
    bits = values[first:]
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
    return scores, values[:first]


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


def _sampled(plan: Plan) -> Indices:
    """Return the indices in the step of the tokens that sample."""
    return _ends(plan)[np.array(plan.sample_rows, np.int64)] - 1


def _spans(plan: Plan, rows: Sequence[Scored | Pooled]) -> list[Indices]:
    """Return the indices in the step of the tokens of each row that are scored or pooled."""
    ends, spans = _ends(plan), []
    for each in rows:
        first = int(ends[each.row]) - (plan.ends[each.row] - plan.starts[each.row])
        if isinstance(each, Pooled):
            spans.append(np.arange(first + each.first, first + each.first + each.num_tokens))
        else:
            spans.append(np.arange(first, first + len(each.next_ids)))
    return spans


def _ends(plan: Plan) -> Indices:
    return np.cumsum(np.array(plan.ends, np.int64) - np.array(plan.starts, np.int64))


def _num_top(plan: Plan) -> int:
    return max(each.num_top for each in plan.scored)
