"""Chooses the number of replicas by the time that a new request would wait.

Why not by the number of open requests: a long prompt and a short one are one request each, so the
number says little about when the next request starts.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

from minisgl_gateway.router.choice import expected_s
from minisgl_gateway.router.replica_state import ReplicaState
from minisgl_gateway.router.view import View

MOST_TAKEN: Final = 0.5
"""A replica is removed only if requests take at most this share of the others' places. Otherwise it
could be needed again at once."""


def scale_stats(state: ReplicaState) -> dict[str, float]:
    """Return the metrics of one replica that `ByWait` reads.

    wait_s: seconds until a new request of one token would start. taken: the share of the replica's
    places that requests take.
    """
    view = View()
    view.state = state
    num_requests = state.num_running + state.num_waiting
    wait_s = expected_s(view.load(view.state_at), 1, 0)
    return {"wait_s": wait_s, "taken": num_requests / state.max_running}


def wanted(num: int, waits_s: Collection[float], taken: Collection[float], target_s: float) -> int:
    """Return the number of replicas to have instead of `num`.

    If the mean wait is above `target_s`: as many as lower it to `target_s` when they divide the
    queue, but at most 2 * num. If every wait is below half of `target_s`, and requests take at most
    `MOST_TAKEN` of the other replicas' places: num - 1.
    """
    if not waits_s:
        return num
    mean_s = sum(waits_s) / len(waits_s)
    if mean_s > target_s:
        return num + math.ceil(num * min(mean_s / target_s - 1, 1.0))
    is_idle = max(waits_s) < target_s / 2
    if num > 1 and is_idle and sum(taken) <= MOST_TAKEN * (num - 1):
        return num - 1
    return num


class ByWait:
    """An autoscaling policy of Ray Serve, which applies bounds and delays to its result."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        waits_s = metrics.get("wait_s", {}).values()
        taken = metrics.get("taken", {}).values()
        return wanted(context.current_num_replicas, waits_s, taken, self._target_s), {}
