"""Steps with late rows, whose masks depend on the tokens of the step before.

The forward pass and the LM head need no masks, so they are enqueued at once. The sampling is
enqueued when the host has the masks (docs/decisions/0021).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from minisgl.core import Plan
from minisgl.core.req import Mask
from minisgl.engine.device import Pending
from minisgl.engine.engine import Engine, no_ids
from minisgl.engine.flight import ForwardOutput
from minisgl.engine.inputs import ForwardTensors, SampleTensors, StepArrays, mask_arrays


def launch_late(engine: Engine, plan: Plan) -> ForwardOutput:
    """Enqueue the forward pass. `Flight.sample_late` of the result enqueues the sampling."""
    forwarded: list[tuple[StepArrays, Tensor]] = []  # filled and emptied in stream order

    def forward() -> Tensor:
        forwarded.append(_forward(engine, plan))
        return no_ids()

    def sample(masks: Sequence[Mask]) -> Pending:
        return engine.enqueue(plan, lambda: _sample(engine, plan, *forwarded.pop(), masks))

    return engine.flight(plan, engine.enqueue(plan, forward), sample)


def _forward(engine: Engine, plan: Plan) -> tuple[StepArrays, Tensor]:
    """Run the forward pass, in stream order. Returns the step's arrays, and the logits of this
    rank's rows. If prompt tokens are scored, it returns hidden states instead of logits, because
    those logits are computed block by block."""
    arrays = engine.begin_step(plan)
    inputs = ForwardTensors.of(arrays, engine.upload(arrays, arrays.forward))
    forward = partial(engine.forward, plan, arrays.padded, inputs)
    x_SD = engine.runner.run(arrays.shape, forward)
    if plan.scored:
        return arrays, x_SD
    return arrays, engine.sampler.logits(x_SD, len(arrays.sample["table_idxs"]), arrays.has_options)


def _sample(
    engine: Engine, plan: Plan, arrays: StepArrays, forwarded: Tensor, masks: Sequence[Mask]
) -> Tensor:
    """Sample from the output of `_forward`, in stream order. Returns the ids as a step does."""
    sampler = engine.sampler
    _, rows = sampler.split(len(arrays.sample["table_idxs"]), arrays.has_options)
    named = arrays.sample | mask_arrays(plan.late_rows, masks, rows)
    tensors = dict(zip(named, engine.device.upload(list(named.values())), strict=True))
    sample = sampler.sample if plan.scored else sampler.choose
    sampled = sample(forwarded, SampleTensors.of(arrays, tensors), plan)
    return engine.end_step(plan, arrays, sampled)
