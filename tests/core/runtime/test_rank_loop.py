"""The link of a rank to the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.core import Plan
from minisgl.distributed import DistributedInfo
from minisgl.message import PlanCheck, StepBroadcast, StepBroadcastMsg
from minisgl.runtime.rank_loop import links
from minisgl.utils.zmq import Endpoints, PullQueue


def plan(step: int) -> Plan:
    return Plan(
        step=step, uids=[0], table_idxs=[0], starts=[step], ends=[step + 1],
        token_ids=np.zeros(1, np.int32), num_decodes=1, sample_rows=[0], output_idxs=[step],
    )  # fmt: skip


@pytest.mark.parametrize(("checks", "steps"), [("1", [0, 1, 2]), ("0", [0])])
def test_every_plan_is_checked_if_asked_for(
    checks: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CHECK_PLANS", checks)
    endpoints = Endpoints.create()
    told: PullQueue[StepBroadcastMsg] = PullQueue(endpoints.broadcasts(1), StepBroadcastMsg)
    engine: Any = SimpleNamespace(launch=lambda plan: None)
    try:
        source, executor, _ = links(engine, endpoints, DistributedInfo(0, 2), lambda queue: queue)
        for step in range(3):
            source.get(0)
            executor.launch(plan(step))
        source.get(0)
        arrived: list[StepBroadcastMsg] = []
        while not arrived or not isinstance(arrived[-1], StepBroadcast) or arrived[-1].step < 3:
            arrived += told.get(10)
        source.close()
    finally:
        told.close()
        endpoints.remove()
    assert [check.step for check in arrived if isinstance(check, PlanCheck)] == steps
    digests = [broadcast.digest for broadcast in arrived if isinstance(broadcast, StepBroadcast)]
    assert digests[0] == 0
    assert len(set(digests)) == 4  # with or without checks, each has a digest of all plans so far
