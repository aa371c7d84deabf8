"""Measures the power of the devices with counters of energy: NVML for GPUs, RAPL for CPUs.

A counter has the energy of the whole device, including the energy that other programs and the idle
device use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

READ_EVERY_S: Final = 0.1
"""The time between the two readings of a measurement. NVML's counter changes about 20 times a
second, and a reading takes about 5 ms on an H200."""

READ_SHARE: Final = 0.01
"""The largest share of the time that readings take. The driver may delay a launch meanwhile."""

Meter = Callable[[], float]
"""Returns joules since a fixed time in the past."""


class PowerMeter:
    """Reads a meter in a thread while the device is busy, for `READ_SHARE` of the time. Mutable.

    NVML's readings take milliseconds, so in the engine's loop they would delay all streams.
    """

    def __init__(self, joules: Meter, every_s: float = READ_EVERY_S) -> None:
        self._joules, self._every_s = joules, every_s
        self._busy = threading.Event()
        self._watts: float | None = 0.0
        self._last_s = 0.0  # the end of the last reading, on `time.perf_counter`
        self._read_first = threading.Event()
        threading.Thread(target=self._run, name="power", daemon=True).start()
        self._read_first.wait()

    def busy(self) -> None:
        """The device begins to compute."""
        self._busy.set()

    def idle(self) -> None:
        """The device has nothing to compute."""
        self._busy.clear()

    def watts(self) -> float | None:
        """Return the power of the last measurement during which the device was busy; None after the
        meter has failed, which a warning reports."""
        return self._watts

    def _run(self) -> None:
        try:
            self._watts, reading_s = self._measure()
            self._read_first.set()
            while self._busy.wait():
                time.sleep(max(self._last_s + reading_s / READ_SHARE - time.perf_counter(), 0))
                if not self._busy.is_set():
                    continue
                watts, reading_s = self._measure()
                if self._busy.is_set():  # else the device was idle for a part of the interval
                    self._watts = watts
        except Exception as error:  # of a driver or a file; requests go on without energy
            self._watts = None
            logger.warning("timings have no energy_j from now on: %s", error)
        finally:
            self._read_first.set()

    def _measure(self) -> tuple[float, float]:
        """Read twice. Returns the mean power between the readings, and the seconds that both
        took."""
        began_s = time.perf_counter()
        joules, read_s = self._joules(), time.perf_counter()
        time.sleep(self._every_s)
        again_s = time.perf_counter()
        more, self._last_s = self._joules(), time.perf_counter()
        watts = (more - joules) / (self._last_s - read_s)
        return watts, read_s - began_s + self._last_s - again_s


def rapl_meter(folder: Path) -> Meter | None:
    """Return a meter of all CPU packages; None if this process can read none of them.

    folder: Linux's powercap tree, /sys/class/powercap.
    """
    try:
        packages = [_Package(zone) for zone in sorted(folder.glob("intel-rapl:*")) if _is_cpu(zone)]
    except (OSError, ValueError) as error:
        logger.info("no energy_j in timings: %s cannot be read: %s", folder, error)
        return None
    return (lambda: sum(package.joules() for package in packages)) if packages else None


def _is_cpu(zone: Path) -> bool:
    return (zone / "name").read_text().startswith("package-")


class _Package:
    """One CPU package. Mutable: it counts how often its counter has returned to zero."""

    def __init__(self, zone: Path) -> None:
        self._counter = zone / "energy_uj"
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last, self._turns = self._read(), 0

    def _read(self) -> int:
        return int(self._counter.read_text())

    def joules(self) -> float:
        now = self._read()
        self._turns += now < self._last
        self._last = now
        return (self._turns * self._range + now) / 1e6


def nvml_meter(uuids: Sequence[str]) -> Meter | None:
    """Return a meter of these GPUs; None if NVML's package is missing or a GPU has no counter."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]

        def joules() -> float:
            return float(sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))) / 1e3

        joules()
    except pynvml.NVMLError as error:
        logger.info("no energy_j in timings: NVML says: %s", error)
        return None
    return joules


def meter_of(device: Any, num_local: int, powercap: Path) -> Meter | None:
    """Return the meter of a server's devices, or None.

    device: a torch device, of one rank. num_local: the ranks on this machine; if `device` is a GPU,
    each has one.
    """
    if device.type != "cuda":
        return rapl_meter(powercap)
    import torch

    properties = map(torch.cuda.get_device_properties, range(num_local))
    return nvml_meter([f"GPU-{one.uuid}" for one in properties])
