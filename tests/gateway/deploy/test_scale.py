"""The options of `minisgl_gateway.deploy`, and the number of replicas that its rule wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from minisgl.errors import ConfigError
from minisgl_gateway.deploy import app
from minisgl_gateway.deploy.options import deploy_options
from minisgl_gateway.deploy.scale import ByWait, scale_stats, wanted
from minisgl_gateway.router.replica_state import ReplicaState

STATE = ReplicaState(
    page_size=16, num_pages=100, num_free_pages=100, num_waiting=0, num_running=0, max_running=10,
    queued_tokens=0, prefill_tokens_per_s=1000.0, finished_per_s=2.0,
)  # fmt: skip


def test_wait_s_is_the_wait_of_the_next_request() -> None:
    assert scale_stats(STATE) == {"wait_s": pytest.approx(0.001), "taken": 0.0}
    busy = msgspec.structs.replace(STATE, queued_tokens=2999, num_running=4, num_waiting=1)
    assert scale_stats(busy) == {"wait_s": pytest.approx(3.0), "taken": 0.5}
    full = msgspec.structs.replace(STATE, num_running=10, num_waiting=7)
    assert scale_stats(full) == {"wait_s": pytest.approx(4.0), "taken": 1.7}


@pytest.mark.parametrize(
    ("waits_s", "taken", "expected"),
    [
        ([2.0, 2.0], [1.0, 1.0], 2),  # at the target
        ([3.0, 3.0], [1.0, 1.0], 3),  # half as many again
        ([0.0, 5.0], [0.1, 1.0], 3),  # the mean is 2.5 s
        ([90.0, 90.0], [1.0, 1.0], 4),  # at most twice as many
        ([0.9, 0.1], [0.2, 0.3], 1),  # one has places for all, twice
        ([0.9, 0.1], [0.3, 0.3], 2),
        ([1.1, 0.1], [0.1, 0.1], 2),  # one still waits
        ([0.0], [0.0], 1),  # the last one stays
        ([], [], 2),  # nothing is known
    ],
)
def test_wanted_replicas_follow_the_wait(
    waits_s: list[float], taken: list[float], expected: int
) -> None:
    assert wanted(len(waits_s) or 2, waits_s, taken, 2.0) == expected


def test_the_policy_reads_rays_context() -> None:
    policy = ByWait(target_s=1.0)
    metrics = {"wait_s": {"r1": 1.5, "r2": 1.5}, "taken": {"r1": 1.0, "r2": 1.0}}
    context = SimpleNamespace(current_num_replicas=2, aggregated_metrics=metrics)
    assert policy(context) == (3, {})
    assert policy(SimpleNamespace(current_num_replicas=2, aggregated_metrics=None)) == (2, {})


def test_options_of_a_command_line_and_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_ROUTE_KEY", raising=False)
    line = {"model": "org/m", "tp": "2", "replicas": "2", "restart": "true", "api_key": "a,b"}
    file = {"model": "org/m", "tp": 2, "replicas": 2, "restart": True, "api_key": "a,b"}
    assert deploy_options(line) == deploy_options(file)
    options = deploy_options(line)
    assert (options.gpus, options.key, options.is_scaled) == (2.0, "a", False)
    cpu = deploy_options({"replicas": 1, "max_replicas": 4, "wait_s": 0.5})
    assert (cpu.gpus, cpu.server.memory_ratio, cpu.is_scaled) == (0.0, 0.125, True)
    names = ("replicas", "max_replicas", "wait_s", "cpus", "gpus", "ingresses")
    assert deploy_options(dict.fromkeys(names)) == deploy_options({})  # nothing behind the colon


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"replicas": 0}, "replicas must be a whole number of 1 or more, got 0"),
        ({"replicas": "two"}, "got 'two'"),
        ({"replicas": 2.5}, "replicas must be a whole number of 1 or more, got 2.5"),
        ({"replicas": float("inf")}, "replicas must be a whole number of 1 or more, got inf"),
        ({"wait_s": 10**400}, "wait_s must be a number of 0.001 or more, got 1000"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must be a whole number of 3 or more"),
        ({"tp": "none"}, "tp must be"),
        ({"port": 80}, "port: not an option of minisgl_gateway.deploy"),
        ({"nowhere": 1}, "nowhere: minisgl_gateway.deploy has no such"),
        ({"model": "org/m", "tp": 2, "gpus": 1}, "has 2 GPUs or none"),
        ({"api_key_file": "keys.toml"}, "MINISGL_ROUTE_KEY"),
    ],
)
def test_wrong_options_are_named(
    given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINISGL_ROUTE_KEY", raising=False)
    with pytest.raises(ConfigError, match=says):
        deploy_options(given)


def test_without_ray_the_application_says_what_to_install() -> None:
    try:
        import ray  # noqa: F401  # whether it is there
    except ModuleNotFoundError:
        with pytest.raises(ConfigError, match=r"pip install 'minisgl\[ray\]'"):
            app({})
    else:
        assert app({"replicas": 2}) is not None
