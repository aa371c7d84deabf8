"""What differs between devices: memory, uploads, and the order in which work runs.

`Device` is the seam. Work handed to `enqueue` runs in order, on the device's stream, while the
caller goes on; the `Pending` that comes back is the marker to wait for. The CPU's stream is a
thread: torch's operators release the interpreter lock, so the scheduler plans the next step while
this one computes, and the overlap loop behaves on a laptop as it does on a GPU.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.engine.config import DEFAULT_MEMORY_RATIO
from minisgl.errors import ConfigError, OutOfDeviceMemory

TUNE_S = 0.1
"""Some 30 steps of the built-in model with each number of threads; a model of 0.6 B has one."""


class Pending(Protocol):
    """Work that is enqueued."""

    def wait(self) -> list[int]:
        """What the work returned, on the host. Raises what the work raised."""


class Runner(ABC):
    """How a step's work is launched."""

    @abstractmethod
    def padded_rows(self, plan: Plan) -> int | None:
        """To how many rows the step is to be padded; None for not at all."""

    @abstractmethod
    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`. Padded steps of one shape do the same work on the same addresses."""


class EagerRunner(Runner):
    """Launch by launch."""

    def padded_rows(self, plan: Plan) -> int | None:
        return None

    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


class Device(ABC):
    """One accelerator, or the CPU.

    probe_tokens: how long a prompt must be for its time to tell the prefill rate.
    stall_target_s: how long a chunk should hold up requests that decode, but no chunk is smaller
    for it than min_chunk_tokens, below which prompts run at a much lower rate.
    warm_up_rows: numbers of decode rows whose steps take different kernels, which are compiled
    before a user waits for them.
    """

    torch_device: torch.device
    probe_tokens: int
    stall_target_s: float
    min_chunk_tokens: int
    warm_up_rows: tuple[int, ...] = ()
    default_memory_ratio: float

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that can still be allocated on the device."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """The most memory that this process has had at a time: of the GPU, allocated; of a CPU,
        resident. Waits for nothing."""

    @abstractmethod
    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Host arrays as device tensors of the same dtypes, all in one transfer.

        Called once in `enqueue`d work. The tensors are valid until the next call; equal shapes
        and dtypes give equal addresses where addresses matter (CUDA graphs).
        """

    @abstractmethod
    def enqueue(self, work: Callable[[], Tensor]) -> Pending:
        """Run `work` after all that was enqueued before; it returns int32 ids on the device."""

    @abstractmethod
    def create_runner(self, max_graph_rows: int) -> Runner:
        """With CUDA graphs of up to `max_graph_rows` rows, on a device that has them; 0: none."""

    @abstractmethod
    def tune(self, decode: Callable[[], object]) -> None:
        """Choose what is best chosen by timing `decode`, which runs one decode step and waits."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` is this device's way to say that an allocation failed."""

    @abstractmethod
    def describe(self) -> str:
        """For the log: which device, how large."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is enqueued and let go of the device."""


class _CpuPending:
    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    def wait(self) -> list[int]:
        ids: list[int] = self._future.result().tolist()
        return ids


class CpuDevice(Device):
    """The machine's own cores and memory. Mutable: it owns the thread that is its stream.

    num_sharing: ranks on this machine, each of which takes an equal part of both.
    """

    torch_device = torch.device("cpu")
    probe_tokens = 64
    stall_target_s = 0.3
    min_chunk_tokens = 64
    """Enough that matrix products dominate, as in a real chunk; 0.5 s for a 0.6 B model on 2
    cores."""
    default_memory_ratio = DEFAULT_MEMORY_RATIO

    def __init__(self, num_sharing: int = 1) -> None:
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu-stream")
        self._num_sharing = num_sharing
        self._num_threads = max(torch.get_num_threads() // num_sharing, 1)
        if num_sharing > 1:
            self._set_threads(self._num_threads)

    def peak_memory_bytes(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # elsewhere it counts in KiB

    def free_bytes(self) -> int:
        free = min(psutil.virtual_memory().available, _cgroup_free_bytes())
        return free // self._num_sharing

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def enqueue(self, work: Callable[[], Tensor]) -> Pending:
        return _CpuPending(self._stream.submit(_inference, work))

    def create_runner(self, max_graph_rows: int) -> Runner:
        return EagerRunner()

    def tune(self, decode: Callable[[], object]) -> None:
        """One thread or all: a small model's products are shorter than waking a second thread."""
        default = torch.get_num_threads()
        seconds: dict[int, list[float]] = {count: [] for count in {1, default}}
        deadline = time.perf_counter() + TUNE_S
        while time.perf_counter() < deadline or not all(seconds.values()):
            for count, times in seconds.items():  # interleaved: the machine may be busy
                self._set_threads(count)
                decode()  # the first after a change warms up
                start = time.perf_counter()
                decode()
                times.append(time.perf_counter() - start)
        best = min(seconds, key=lambda count: statistics.median(seconds[count]))
        self._set_threads(best)
        self._num_threads = best

    def _set_threads(self, count: int) -> None:
        """Of the stream alone: OpenMP keeps the number per thread. The process's is the user's."""
        default = torch.get_num_threads()
        self._stream.submit(torch.set_num_threads, count).result()
        torch.set_num_threads(default)  # for threads that start later

    def is_out_of_memory(self, error: BaseException) -> bool:
        # torch's CPU allocator has no exception class of its own.
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        )

    def describe(self) -> str:
        return f"CPU, {self._num_threads} thread{'s' if self._num_threads > 1 else ''}"

    def close(self) -> None:
        self._stream.shutdown()


def _inference(work: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():  # thread-local, so it is entered on the stream's thread
        return work()


def _cgroup_free_bytes() -> int:
    """What a container's memory limit (cgroup v2) leaves; without one, more than any machine."""
    unlimited = 1 << 62
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return unlimited
    return unlimited if limit == "max" else max(int(limit) - used, 0)


def create_device(name: str, index: int = 0, count: int = 1) -> Device:
    """`--device` by name; auto is a GPU where torch finds one.

    index: which of the `count` ranks on this machine it is for; each has a GPU of its own, a CPU
    they share. Raises ConfigError where there are too few GPUs.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; one of auto, cpu, cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CpuDevice(count)
    from minisgl.engine.cuda import CudaDevice  # it builds on this module

    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus < count:
        raise ConfigError(
            f"{count} ranks on this machine need a GPU each, but torch finds {num_gpus}; lower "
            "--tp, spread the ranks with --nnodes, or look at CUDA_VISIBLE_DEVICES"
        )
    return CudaDevice(index)


def out_of_memory(what: str, advice: str, error: BaseException) -> OutOfDeviceMemory:
    """The error that says which option to turn, which way."""
    return OutOfDeviceMemory(f"out of memory while {what}: {advice} ({error})")
