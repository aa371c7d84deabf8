"""A launched step. `wait` returns its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minisgl.core import Plan, StepFailed, StepOutcome, StepResult
from minisgl.core.plan import Flight
from minisgl.core.req import IdArray, Mask
from minisgl.engine.device import Device, Pending, out_of_memory
from minisgl.engine.logprobs import result_with_logprobs
from minisgl.engine.prompt_scores import reported_result
from minisgl.errors import AdapterLost

SampleLate = Callable[[Sequence[Mask]], Pending]


@dataclass(slots=True)
class ForwardOutput(Flight):
    """A launched step. Mutable: `sample_late` sets `sampled`.

    pending: the whole step, or only its forward pass if it has late rows. sample: enqueues the
    sampling of a step with late rows. is_alone: whether this is the only rank. num_guesses: behind
    each sampled token.
    """

    plan: Plan
    device: Device
    pending: Pending
    is_alone: bool
    num_guesses: int = 0
    sample: SampleLate | None = None
    sampled: Pending | None = None

    def sample_late(self, masks: Sequence[Mask]) -> None:
        assert self.sample is not None
        assert self.sampled is None
        self.sampled = self.sample(masks)

    def wait(self) -> StepOutcome:
        """Wait for the step and return its outcome.

        A lost adapter fails its requests, which every rank agrees on before it computes. A failed
        allocation fails the step's newest requests. Any other error is a bug and ends the worker.
        With several ranks a failed allocation ends the worker too, because the other ranks wait for
        this one in a collective.
        """
        assert self.sample is None or self.sampled is not None, "the late rows are not sampled"
        try:
            values = self.pending.wait()
            values = self.sampled.wait() if self.sampled else values
            if not self.num_guesses:
                return _result(self.plan, values)
            end = len(values) - self.num_guesses * len(self.plan.sample_rows)
            result = _result(self.plan, values[:end])
            return replace(result, guesses=values[end:].reshape(-1, self.num_guesses).tolist())
        except AdapterLost as error:
            return StepFailed(error=error, uids=())
        except Exception as error:
            if not self.device.is_out_of_memory(error):
                raise
            advice = (
                "lower --max-prefill-length, --max-running-requests, --memory-ratio or --num-pages"
            )
            failure = out_of_memory("computing a step", advice, error)
            if not self.is_alone:
                raise failure from error
            plan = self.plan
            last = plan.num_decodes - plan.num_drafts - 1  # behind it are drafts, of any requests
            newest = plan.uids[plan.num_decodes :] or [plan.uids[last]]
            return StepFailed(error=failure, uids=tuple(newest))


def _result(plan: Plan, values: IdArray) -> StepResult:
    """Return the result of a step. values: the output of `Sampler.sample`, on the host."""
    if plan.reports:
        return reported_result(plan, values, _result)
    if plan.logprob_rows:
        return result_with_logprobs(plan, values)
    return StepResult(next_ids=values.tolist())
