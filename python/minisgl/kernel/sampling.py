"""The reference of random sampling: temperature, top-k, top-p, min-p, Gumbel noise.

`Ops.sample` is its specification. Axes: S rows that sample, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import BatchSamplingArgs
from minisgl.kernel.philox import gumbel_noise


def sample_random(logits_SV: Tensor, greedy_S: Tensor, args: BatchSamplingArgs) -> Tensor:
    """Return the next token id of each row, int32 [S]. greedy_S: the ids that rows of temperature 0
    get."""
    assert args.temperatures is not None
    assert args.seeds is not None
    assert args.output_idxs is not None
    is_greedy_S = args.temperatures == 0
    temperatures_S1 = args.temperatures.masked_fill(is_greedy_S, 1.0)[:, None]
    x_SV = logits_SV.float()
    # The largest becomes 0, so that not even the smallest temperature overflows.
    x_SV = (x_SV - x_SV.amax(-1, keepdim=True)) / temperatures_S1
    if args.top_ks is not None or args.top_ps is not None:
        x_SV = _keep_top(x_SV, args.top_ks, args.top_ps)
    if args.min_ps is not None:
        x_SV = x_SV.masked_fill(x_SV < args.min_ps.log()[:, None], -torch.inf)
    noise_SV = gumbel_noise(args.seeds, args.output_idxs, x_SV.shape[1])
    return torch.where(is_greedy_S, greedy_S, (x_SV + noise_SV).argmax(-1)).int()


def _keep_top(x_SV: Tensor, top_ks: Tensor | None, top_ps: Tensor | None) -> Tensor:
    """Apply top-k, then top-p: the entries that they drop become -inf."""
    sorted_SV = x_SV.sort(-1, descending=True).values
    num_vocab = x_SV.shape[1]
    if top_ks is not None:
        k_S = top_ks.long().masked_fill(top_ks == 0, num_vocab).clamp(max=num_vocab)
        threshold_S1 = sorted_SV.gather(1, k_S[:, None] - 1)
        x_SV = x_SV.masked_fill(x_SV < threshold_S1, -torch.inf)
        sorted_SV = sorted_SV.masked_fill(sorted_SV < threshold_S1, -torch.inf)
    if top_ps is not None:
        # An entry is kept if the entries before it have less than p of the mass. So the entry that
        # reaches p is kept.
        mass_SV = sorted_SV.double().softmax(-1).cumsum(-1)
        before_SV = mass_SV.roll(1, -1)
        before_SV[:, 0] = 0
        num_kept_S = (before_SV < top_ps.double()[:, None]).sum(-1)
        # p = 1 keeps all entries, even if the rounded probabilities sum up to less.
        num_kept_S = num_kept_S.masked_fill(top_ps >= 1, num_vocab)
        threshold_S1 = sorted_SV.gather(1, num_kept_S[:, None] - 1)
        x_SV = x_SV.masked_fill(x_SV < threshold_S1, -torch.inf)
    return x_SV
