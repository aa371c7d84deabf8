"""The bound of a twin's difference from attention in float64, derived for each query and head.

With weights p_c of keys c, output o = sum p_c v_c, roundoff u of the dtype, a twin errs by

1. `u |o|`, where it rounds the output;
2. `p_c e_c` in each weight, where it rounds the weight before it multiplies v (u, in 16 bits) and
   where the score is off (float32 sums: `SUM_ERROR` of the magnitudes that were summed, and of a
   softcap, by which tanh is multiplied). That
   moves the output by `sum p_c e_c v_c`, and the sum of all weights, which divides, by at most
   `sum p_c e_c` of it;
3. `SUM_ERROR` of `sum p_c |v_c|` in the sums of weights times values.

In 2 the errors do not depend on v, whose signs are random and independent: so `sum p_c e_c v_c` is
sub-Gaussian with variance `sum (p_c e_c v_c)^2`, and the mean of its squares over the head dim is
below what `_noise` returns but for a chance of exp(-CHANCE) (Hsu, Kakade and Zhang, "A tail
inequality for quadratic forms of subgaussian random vectors", 2012). A worst case in place of that
chance would be 10 and more times as wide in long contexts, and would hide a wrong page.

Sensitivity: the error's root mean square over a head may be some 3.5 u of the output's own, and
rounding takes a sixth of that. With random keys, a wrong page of 16 shows in contexts of 3,000 in
any dtype, and of 40,000 in float16; in bfloat16 one of four such pages does not show there, and
from 1,000 on most single keys do not. `count_keys` makes a step in which each key shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from helpers.attention_cases import Step

CPU = torch.device("cpu")
ROUNDOFF = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
WEIGHT_ROUNDOFF = ROUNDOFF | {torch.float32: 0.0}  # p stays in float32 there
TINY = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2**-25}  # rounding a subnormal
SUM_ERROR = {torch.float32: 2**-22, torch.bfloat16: 2**-18, torch.float16: 2**-18}
"""Relative to the sum of magnitudes. A 16-bit matrix instruction cuts bits of its float32 sums."""
CHANCE = 25.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a step in float64, with heads of keys repeated for their queries.

    tokens: its places in the step. seen_QC: causal and in the window. softcap, sinks_N: None if
    absent.
    """

    tokens: slice
    q_NQH: Tensor
    k_NCH: Tensor
    v_NCH: Tensor
    seen_QC: Tensor
    scale: float
    softcap: float | None
    sinks_N: Tensor | None

    @property
    def scores_NQC(self) -> Tensor:
        scores = self.q_NQH @ self.k_NCH.mT * self.scale
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    @property
    def weights_NQC(self) -> Tensor:
        scores = self.scores_NQC.masked_fill(~self.seen_QC, -torch.inf)
        if self.sinks_N is None:
            return scores.softmax(-1)
        sinks = self.sinks_N[:, None, None].expand(*scores.shape[:2], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def rows_of(step: Step, device: torch.device = CPU) -> Iterator[Row]:
    offset = 0
    for (k, v), start, end in zip(step.contexts, step.plan.starts, step.plan.ends, strict=True):
        tokens = slice(offset, offset + end - start)
        offset = tokens.stop
        group = step.layer.num_q_heads // step.layer.num_kv_heads
        query, key = torch.arange(start, end)[:, None], torch.arange(end)[None]
        seen = key <= query
        if step.batch.key_ends is not None:
            seen = key < step.batch.key_ends[tokens][:, None]
        if step.layer.window is not None:
            seen &= query - key < step.layer.window
        yield Row(
            tokens=tokens,
            q_NQH=step.q[tokens].to(device).double().transpose(0, 1),
            k_NCH=k.to(device).double().transpose(0, 1).repeat_interleave(group, 0),
            v_NCH=v.to(device).double().transpose(0, 1).repeat_interleave(group, 0),
            seen_QC=seen.to(device),
            scale=step.layer.scale,
            softcap=step.layer.softcap,
            sinks_N=sinks.weight.to(device).double() if (sinks := step.layer.sinks) else None,
        )


def worst_share(got: Tensor, step: Step) -> float:
    """Return the largest error of a query's head, divided by its bound; at most 1 is right."""
    shares = []
    for row in rows_of(step, got.device):
        p = row.weights_NQC
        want = p @ row.v_NCH
        error = got[row.tokens].double().transpose(0, 1) - want
        shares.append((_rms(error) / _bound(row, p, want, got.dtype)).max())
    return float(torch.stack(shares).max())  # NaN, if one is


def _bound(row: Row, p_NQC: Tensor, want_NQH: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bound [N, Q] of the error's root mean square over the head dim."""
    largest = row.scores_NQC.abs().masked_fill(~row.seen_QC, 0).amax(-1, keepdim=True)
    if row.sinks_N is not None:
        largest = largest.maximum(row.sinks_N.abs()[:, None, None])
    magnitudes = row.q_NQH.abs() @ row.k_NCH.abs().mT * row.scale
    of_scores = SUM_ERROR[dtype] * (1 + magnitudes + largest + (row.softcap or 0))
    # A weight is rounded when the largest so far counts as 1.
    most = p_NQC.amax(-1, keepdim=True).maximum(1 - p_NQC.sum(-1, keepdim=True))
    tiny = TINY[dtype] * most
    errors = (p_NQC * (WEIGHT_ROUNDOFF[dtype] + of_scores) + tiny) * row.seen_QC
    relative = ROUNDOFF[dtype] + errors.sum(-1) + of_scores.amax(-1)  # at most, of a sink's weight
    of_sums = SUM_ERROR[dtype] * _rms(p_NQC @ row.v_NCH.abs())
    return _noise(errors, row.v_NCH) + relative * _rms(want_NQH) + of_sums + TINY[dtype]


def _noise(errors_NQC: Tensor, v_NCH: Tensor) -> Tensor:
    """Return a bound [N, Q] of the root mean square of `errors @ v` for all but the least likely
    signs of v."""
    variances = errors_NQC.square() @ v_NCH.square()
    tail = 2 * (CHANCE * variances.square().sum(-1)).sqrt() + 2 * CHANCE * variances.amax(-1)
    return ((variances.sum(-1) + tail) / variances.shape[-1]).sqrt()


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


# --- every key shows ---------------------------------------------------------------------------


def count_keys(step: Step) -> None:
    """Change the step, in place, so that each output counts keys, all of which weigh the same.

    The values of each key have a 1 in one random dim of one head and zeros elsewhere. So an output
    is a number of keys over the length of the context, and it is off by 1 if a key is missing, read
    twice or another row's. All queries of a row ask for one dim, which is zero in this row's keys
    only: another row's keys weigh more or less.
    """
    gen = torch.Generator().manual_seed(0)
    num_heads, head_dim = step.layer.num_kv_heads, step.layer.head_dim
    pool, table = step.batch.context.kv_pool.layer(1), step.batch.context.page_table
    page_size, offset = pool.k.shape[1], 0
    rows = zip(step.contexts, step.plan.table_idxs, step.plan.starts, step.plan.ends, strict=True)
    for index, ((k, v), table_idx, start, end) in enumerate(rows):
        k[..., index % head_dim] = 0
        owner = torch.randperm(end, generator=gen) % (num_heads * head_dim)
        v.copy_(torch.nn.functional.one_hot(owner, num_heads * head_dim).view(v.shape))
        cached = torch.arange(start)
        slots = table[table_idx, cached // page_size].long() * page_size + cached % page_size
        pool.k.flatten(0, 1)[slots], pool.v.flatten(0, 1)[slots] = k[:start], v[:start]
        tokens = slice(offset, offset + end - start)
        offset = tokens.stop
        step.k[tokens], step.v[tokens] = k[start:], v[start:]
        step.q[tokens] = 0
        step.q[tokens, :, index % head_dim] = 4


def worst_miscount(got: Tensor, step: Step) -> float:
    """Return the largest error of an output in keys, after `count_keys`. A missing key makes 1; all
    roundings together make less than half, which is checked."""
    worst = 0.0
    for row in rows_of(step, got.device):
        seen = row.seen_QC.sum(-1)[:, None]
        counts = row.seen_QC.double() @ row.v_NCH
        # A part of the context may be rounded as well as the whole, and weights in float32.
        error = (2 * ROUNDOFF[got.dtype] + 2**-16) * counts.max() + 2 * TINY[got.dtype] * seen.max()
        assert error < 0.5, f"{counts.max():.0f} keys in one dim: use more heads"
        miscount = (got[row.tokens].double().transpose(0, 1) * seen - counts).abs().max()
        worst = max(worst, math.inf if miscount.isnan() else float(miscount))
    return worst
