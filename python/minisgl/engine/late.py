"""Steps with late rows: rows that the host lets sample after the step before has settled.

The forward pass is enqueued at once, the sampling when the masks are there (docs/decisions/0021).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from minisgl.core import Plan
from minisgl.core.masker import Mask
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
    """Run the forward pass, in stream order. Returns the hidden states [S, D] too."""
    arrays = engine.begin_step(plan)
    inputs = ForwardTensors.of(arrays, engine.upload(arrays, arrays.forward))
    forward = partial(engine.forward, plan, arrays.padded, inputs)
    return arrays, engine.runner.run(arrays.shape, forward)


def _sample(
    engine: Engine, plan: Plan, arrays: StepArrays, x_SD: Tensor, masks: Sequence[Mask]
) -> Tensor:
    """Sample the rows of `_forward`, in stream order. Returns the ids as a step does."""
    _, rows = engine.sampler.share(len(arrays.sample["table_idxs"]), arrays.has_options)
    named = arrays.sample | mask_arrays(plan.late_rows, masks, rows)
    tensors = dict(zip(named, engine.device.upload(list(named.values())), strict=True))
    sampled = engine.sampler.sample(x_SD, SampleTensors.of(arrays, tensors), plan)
    return engine.end_step(plan, arrays, sampled)
