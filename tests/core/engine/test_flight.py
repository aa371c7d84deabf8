"""Which requests fail when a step finds no memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.step_plans import make_plan
from minisgl.core import Plan, StepFailed
from minisgl.engine.cpu import CpuDevice
from minisgl.engine.flight import ForwardOutput


class _NoMemory:
    def wait(self) -> Any:
        raise MemoryError


WITH_DRAFTS = replace(make_plan(3, [], last_samples=True), uids=[4, 5, 4], num_drafts=1)


@pytest.mark.parametrize(
    ("plan", "failed"),
    [
        (make_plan(2, [(0, 3), (0, 2)], last_samples=True), (2, 3)),
        (make_plan(3, [], last_samples=True), (2,)),
        (WITH_DRAFTS, (5,)),  # the last row is a draft of the older request
    ],
    ids=["prompts", "decodes", "drafts"],
)
def test_the_newest_requests_fail(plan: Plan, failed: tuple[int, ...]) -> None:
    device = CpuDevice()
    outcome = ForwardOutput(plan, device, _NoMemory(), is_alone=True).wait()
    device.close()
    assert isinstance(outcome, StepFailed)
    assert outcome.uids == failed
