"""The model's own guess of the token after a sampled one, by its layer of multi-token prediction.

The layer takes, at each position, the model's hidden state and the next token::

    step            tokens 5 to 8 of a prompt         decode of token 8
    hidden state    h5  h6  h7  h8                    h8
    next token      t6  t7  t8  t9: the host knows it  t9: this step has sampled it
    KV              of positions 5 to 8               of position 8
    guess           -                                 t10

So the layer runs after sampling, for all tokens of the step, and its KV exists wherever the model's
does. Two things may make a guess worse, and none makes an answer wrong. Behind a reused prefix, the
KV of the prefix's last position may have seen another next token. A wrong draft's KV lies behind
the computed tokens, and later steps overwrite it, as they do the model's.

A guess has the noise that the token will have, so that it is equal as often as the model's own
token would be. It sees no mask, and no option that changes logits.

Axes: T tokens of the step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minisgl.core import PROMISED, Batch

if TYPE_CHECKING:
    from minisgl.distributed import DistributedCommunicator
    from minisgl.engine.inputs import Array, StepInputs
    from minisgl.kernel.ops import Ops
    from minisgl.models import BaseLLMModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGuesser:
    """`minisgl.engine.extras.Guesser`. layer: its forward pass. batch: makes the arguments of the
    model's forward pass, with the given ids and the indices of the tokens to return."""

    layer: Callable[[Tensor, Batch], Tensor]
    model: BaseLLMModel
    comm: DistributedCommunicator
    ops: Ops
    batch: Callable[[StepInputs, Tensor, Tensor], Batch]
    needs_states: bool = True
    num_guesses: int = 1

    def arrays(self, inputs: StepInputs) -> dict[str, Array]:
        """next_ids: int32 [T], the token after each; 0 where the step samples it. guess_positions:
        int64 [S], the indices of the tokens that sample, without padding."""
        plan, (_, firsts, lengths, _) = inputs.plan, inputs.forward["rows"]
        next_ids = np.roll(inputs.forward["token_ids"], -1)
        next_ids[next_ids == PROMISED] = 0
        padding = inputs.num_decodes - plan.num_decodes
        at = inputs.num_decodes + len(plan.next_ids)
        lasts = (firsts + lengths)[inputs.num_decodes : at] - 1
        next_ids[lasts] = np.array(plan.next_ids, np.int32).clip(min=0)
        rows = np.array(plan.sample_rows, np.int64)
        rows[rows >= plan.num_decodes] += padding
        ends = (firsts + lengths)[rows].astype(np.int64)
        return {"next_ids": next_ids, "guess_positions": ends - 1}

    def guess(self, x_TD: Tensor, sampled: Tensor, inputs: StepInputs) -> Tensor:
        positions_S, next_T = inputs["guess_positions"], inputs["next_ids"]
        count = len(positions_S)
        next_T[positions_S] = sampled.flatten()[:count].clamp(min=0)
        x_SD = self.layer(x_TD, self.batch(inputs, next_T, positions_S))
        if not count:
            return torch.empty(0, dtype=torch.int32, device=x_TD.device)
        args = inputs.sampling_args().take(range(count))
        if args.output_idxs is not None:
            args = replace(args, output_idxs=args.output_idxs + 1)
        return self.comm.broadcast(self.ops.sample(self.model.logits(x_SD), args))
