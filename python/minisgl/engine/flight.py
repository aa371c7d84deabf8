"""A launched step, and its outcome once the device has finished it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.core import Plan, StepFailed, StepOutcome, StepResult
from minisgl.core.executor import Flight
from minisgl.core.masker import Mask
from minisgl.engine.device import Device, Pending, out_of_memory

SampleLate = Callable[[Sequence[Mask]], Pending]


@dataclass(slots=True)
class ForwardOutput(Flight):
    """A launched step. Mutable: `sample_late` sets `sampled`.

    pending: the whole step, or only its forward pass if it has late rows. sample: enqueues the
    sampling of a step with late rows. is_alone: there is no other rank.
    """

    plan: Plan
    device: Device
    pending: Pending
    is_alone: bool
    sample: SampleLate | None = None
    sampled: Pending | None = None

    def sample_late(self, masks: Sequence[Mask]) -> None:
        assert self.sample is not None
        assert self.sampled is None
        self.sampled = self.sample(masks)

    def wait(self) -> StepOutcome:
        """Wait for the step and return its outcome.

        A failed allocation fails the step's newest requests. Any other error is a bug and ends the
        worker. With several ranks a failed allocation ends the worker too, because the other ranks
        wait for this one in a collective.
        """
        assert self.sample is None or self.sampled is not None, "the late rows are not sampled"
        try:
            values = self.pending.wait()
            return _result(self.plan, self.sampled.wait() if self.sampled else values)
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
    """values: S ids; if a row asks for log-probabilities, the bits of S float32; if M rows ask for
    the K most likely tokens, ids [M, K] and the bits of float32 [M, K]."""
    if plan.scored:
        from minisgl.engine.prompt_scores import scored_result

        return scored_result(plan, values, _result)
    if not plan.logprob_rows:
        return StepResult(next_ids=values)
    num_samples = len(plan.sample_rows)
    logprobs = _floats(values[num_samples : 2 * num_samples])
    return StepResult(
        next_ids=values[:num_samples],
        logprobs={index: logprobs[index] for index in plan.logprob_rows},
        tops=_tops(plan.top_rows, values[2 * num_samples :]) if plan.top_rows else {},
    )


def _tops(rows: list[int], values: list[int]) -> dict[int, list[tuple[int, float]]]:
    num_top, half = len(values) // (2 * len(rows)), len(values) // 2
    pairs = list(zip(values[:half], _floats(values[half:]), strict=True))
    return {row: pairs[i * num_top : (i + 1) * num_top] for i, row in enumerate(rows)}


def _floats(bits: list[int]) -> list[float]:
    floats: list[float] = np.array(bits, np.int32).view(np.float32).tolist()
    return floats
