"""A launched step, and its outcome once the device has finished it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.core import Plan, StepFailed, StepOutcome, StepResult
from minisgl.engine.device import Device, Pending, out_of_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """A launched step: `minisgl.core.executor.Flight`."""

    plan: Plan
    device: Device
    pending: Pending
    is_alone: bool

    def wait(self) -> StepOutcome:
        """The step's ids. A failed allocation fails the step's newest requests; any other error is
        a bug of ours and ends the worker. So does an allocation that fails on one of many ranks:
        the others wait in a collective that this one left out."""
        try:
            return _result(self.plan, self.pending.wait())
        except Exception as error:
            if not self.device.is_out_of_memory(error):
                raise
            advice = (
                "lower --max-prefill-length, --max-running-requests, --memory-ratio or --num-pages"
            )
            failure = out_of_memory("computing a step", advice, error)
            if not self.is_alone:
                raise failure from error
            newest = self.plan.uids[self.plan.num_decodes :] or self.plan.uids[-1:]
            return StepFailed(error=failure, uids=tuple(newest))


def _result(plan: Plan, values: list[int]) -> StepResult:
    """values: S ids and, where a row asks for log-probabilities, the bits of S float32."""
    if not plan.logprob_rows:
        return StepResult(next_ids=values)
    num_samples = len(plan.sample_rows)
    logprobs = np.array(values[num_samples:], np.int32).view(np.float32).tolist()
    return StepResult(
        next_ids=values[:num_samples],
        logprobs={index: logprobs[index] for index in plan.logprob_rows},
    )
