"""The energy of CPUs, read from files like those of Linux, and a server's reports of it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.running_server import RunningServer
from minisgl_gateway.watch.energy import PowerMeter, nvml_meter, rapl_meter


def make_zone(folder: Path, name: str, label: str, microjoules: int) -> Path:
    zone = folder / name
    zone.mkdir()
    (zone / "name").write_text(f"{label}\n")
    (zone / "energy_uj").write_text(f"{microjoules}\n")
    (zone / "max_energy_range_uj").write_text("1000000\n")
    return zone


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


@pytest.fixture
def powered(launch: Any, tmp_path: Path) -> Iterator[RunningServer]:
    """A server whose CPU counter grows by a watt."""
    zone = make_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    (zone / "max_energy_range_uj").write_text("1000000000000\n")
    ended, began = threading.Event(), time.monotonic()

    def grow() -> None:
        while not ended.wait(0.002):
            new = zone / "new"
            new.write_text(f"{round((time.monotonic() - began) * 1e6)}\n")
            new.replace(zone / "energy_uj")

    thread = threading.Thread(target=grow)
    thread.start()
    yield launch("--log-requests", MINISGL_POWERCAP=str(tmp_path))
    ended.set()
    thread.join()


def test_a_server_reports_device_time_and_energy(powered: RunningServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
    energy = device_s = 0.0
    deadline = time.monotonic() + 120
    with httpx.Client(base_url=powered.url, timeout=150) as http:
        while not energy:  # a busy machine may hold up the thread of the counter for an answer
            assert time.monotonic() < deadline
            timings = http.post("/v1/completions", json=body).raise_for_status().json()["timings"]
            assert 0 < timings["device_s"] <= 1.01 * (timings["prefill_s"] + timings["decode_s"])
            energy += timings["energy_j"]
            device_s += timings["device_s"]
        metrics = http.get("/metrics").text
    told = {
        name: float(value)
        for name, value in re.findall(r"^minisgl_(\w+)_total ([\d.]+)$", metrics, re.M)
    }
    assert told["energy_joules"] == pytest.approx(energy, abs=1e-4)
    assert told["device_seconds"] == pytest.approx(device_s, abs=1e-4)
    assert "energy_j=" in powered.wait_for(r"(request id=.*)", "err")


def test_a_server_without_a_counter_has_no_such_fields(builtin: RunningServer) -> None:
    body = {"prompt": "Hi", "max_tokens": 2}
    answer = httpx.post(f"{builtin.url}/v1/completions", json=body, timeout=150)
    assert not {"device_s", "energy_j"} & answer.json()["timings"].keys()
    assert "joules" not in httpx.get(f"{builtin.url}/metrics").text
