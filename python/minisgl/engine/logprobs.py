"""The log-probabilities of sampled tokens, for requests that ask for them, beside the sampled ids.

Axes: S rows that sample, R those of this rank, V vocabulary, M rows that ask for the K most likely
tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.engine.inputs import SampleTensors
from minisgl.kernel.ops import Ops


def with_logprobs(
    ops: Ops,
    ids_S: Tensor,
    known_R: Tensor,
    logits_RV: Tensor,
    inputs: SampleTensors,
    gather: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return int32 [2, S]: the ids, and the bits of the float32 log-probabilities of `known_R`. If
    rows ask for the most likely tokens, return these values flat, and then ids and bits of [M, K].

    gather: joins the ranks' rows; None where this rank has all.
    """
    logprobs_R = ops.logprobs(logits_RV, known_R).view(torch.int32)
    logprobs_S = gather(logprobs_R) if gather else logprobs_R
    if inputs.top_rows is None:
        return torch.stack((ids_S, logprobs_S))
    top_ids_MK, top_MK = ops.top_logprobs(logits_RV[inputs.top_rows], inputs.num_top)
    parts = (ids_S, logprobs_S, top_ids_MK.flatten(), top_MK.view(torch.int32).flatten())
    return torch.cat(parts)
