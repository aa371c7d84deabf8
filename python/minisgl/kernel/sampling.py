"""The reference of random sampling: temperature, top-k, top-p, min-p, Gumbel noise.

`Ops.sample` is its specification. The noise is a function of its coordinates, from Philox4x32-10:
Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). With a
generator that has a state, a request's noise would depend on the other requests of its batch. A
counter-based one gives the noise at (seed, output index, vocabulary id) in any order, on any
device. The layout is that of Triton's `tl.philox(seed, c0, c1, c2, c3)`:

    key     = low, high half of the seed
    counter = vocabulary id // 4, low, high half of the output index, 0
    word    = vocabulary id % 4 of the four that come out

Axes: S rows that sample, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import BatchSamplingArgs

ROUNDS = 10
"""The paper recommends ten rounds: seven pass all its tests, and three are its margin."""
# Table 2 and section 3 of the paper give the multipliers and Weyl constants (Random123, philox.h).
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

LARGEST_UNIFORM = 1 - 2**-24
"""The largest float32 below 1, with which log(1 - u) is finite."""


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


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return four words in [0, 2**32) per counter, as int64. The arguments are int64 and
    broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The 64-bit products wrap into the sign; masking the halves undoes that.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32 & _LOW) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> 32 & _LOW) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = k0 + WEYL[0] & _LOW, k1 + WEYL[1] & _LOW
    return c0, c1, c2, c3


def gumbel_noise(seeds_S: Tensor, output_idxs_S: Tensor, num_vocab: int) -> Tensor:
    """Return standard Gumbel noise, float32 [S, num_vocab]. Seeds and output indices are int64."""
    zero_S1 = torch.zeros_like(seeds_S)[:, None]
    index_S1 = output_idxs_S[:, None]
    seed_S1 = seeds_S[:, None]
    group_1G = torch.arange((num_vocab + 3) // 4, device=seeds_S.device)[None]
    words = philox(
        (group_1G + zero_S1, index_S1 & _LOW, index_S1 >> 32 & _LOW, zero_S1),
        (seed_S1 & _LOW, seed_S1 >> 32 & _LOW),
    )
    word_SV = torch.stack(words, dim=-1).flatten(1)[:, :num_vocab]
    # -log(-log(1 - u)) with u in (0, 1): small u, where float32 is dense, give the largest noise.
    uniform_SV = ((word_SV.float() + 0.5) * 2**-32).clamp(max=LARGEST_UNIFORM)
    return -(-torch.log1p(-uniform_SV)).log()
