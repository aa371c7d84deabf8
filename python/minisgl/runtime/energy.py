"""Counters of the energy that the devices use: NVML for GPUs, RAPL for CPUs.

A counter has the energy of the whole device since some time in the past: what other programs and an
idle device use is in it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

Meter = Callable[[], float]
"""Returns joules since some time in the past."""


def rapl_meter(folder: Path) -> Meter | None:
    """Return a meter of all CPU packages; None if there is none that may be read.

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
    """One CPU package. Mutable: its counter begins again at zero after `max_energy_range_uj`."""

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
    """Return a meter of these GPUs; None without NVML's package or a counter in each of them."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

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

    device: torch's, of one rank. num_local: ranks on this machine, each with a GPU if it is one.
    """
    if device.type != "cuda":
        return rapl_meter(powercap)
    import torch

    properties = map(torch.cuda.get_device_properties, range(num_local))
    return nvml_meter([f"GPU-{one.uuid}" for one in properties])
