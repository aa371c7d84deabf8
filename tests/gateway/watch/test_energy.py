"""The energy of CPUs, read from files like those of Linux."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest

from helpers.power_zones import make_zone
from helpers.running_server import RunningServer
from minisgl_gateway.watch.energy import PowerMeter, nvml_meter, rapl_meter


def test_rapl_is_the_sum_of_the_packages_and_goes_on_after_their_range(tmp_path: Path) -> None:
    first = make_zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    make_zone(tmp_path, "intel-rapl:0:0", "core", 5)
    make_zone(tmp_path, "intel-rapl:1", "package-1", 100_000)
    make_zone(tmp_path, "intel-rapl:2", "psys", 999)
    meter = rapl_meter(tmp_path)
    assert meter
    assert meter() == pytest.approx(1.0)
    (first / "energy_uj").write_text("50000\n")
    assert meter() == pytest.approx(1.15)


def test_without_counters_there_is_no_meter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert rapl_meter(tmp_path / "none") is None
    assert rapl_meter(tmp_path) is None
    zone = make_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (zone / "energy_uj").unlink()
    with caplog.at_level("INFO"):
        assert rapl_meter(tmp_path) is None
    assert "cannot be read" in caplog.text


def test_no_meter_without_nvml() -> None:
    assert nvml_meter(["GPU-none"]) is None


def test_a_slow_meter_delays_no_caller() -> None:
    began, num_readings = time.perf_counter(), 0
    may_read = threading.Event()

    def joules() -> float:
        nonlocal num_readings
        num_readings += 1
        if num_readings > 2:
            assert may_read.wait(60)
        return 100.0 * (time.perf_counter() - began)

    power = PowerMeter(joules, every_s=0.01)
    watts = power.watts()
    assert watts
    assert watts > 0
    power.busy()  # the thread waits in the third reading
    assert power.watts() == watts
    may_read.set()
    power.idle()


def test_a_slow_meter_is_read_seldom() -> None:
    ends: list[float] = []
    enough = threading.Event()

    def joules() -> float:
        time.sleep(0.001)
        ends.append(time.perf_counter())
        if len(ends) == 6:
            enough.set()
        return ends[-1]

    power = PowerMeter(joules, every_s=0.001)
    power.busy()
    assert enough.wait(60)
    power.idle()
    # Pairs of readings that take 2 ms or more, and between two pairs 100 times as long.
    assert min(ends[2] - ends[1], ends[4] - ends[3]) > 0.2


def test_power_is_unknown_after_the_meter_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    def joules() -> float:
        raise OSError("the driver is gone")

    assert PowerMeter(joules).watts() is None
    assert "no energy_j from now on: the driver is gone" in caplog.text


def test_a_server_without_a_counter_has_no_such_fields(builtin: RunningServer) -> None:
    body = {"prompt": "Hi", "max_tokens": 2}
    answer = httpx.post(f"{builtin.url}/v1/completions", json=body, timeout=150)
    assert not {"device_s", "energy_j"} & answer.json()["timings"].keys()
    assert "joules" not in httpx.get(f"{builtin.url}/metrics").text
