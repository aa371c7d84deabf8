"""The CPU as a device: one thread is its stream.

torch's operators release the interpreter lock, so the scheduler plans the next step while this one
computes. Overlap works as on a GPU.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from minisgl import plugins
from minisgl.core.req import IdArray
from minisgl.engine.device import Device, EagerRunner, Pending, Runner
from minisgl.utils.container import container_bytes, container_cores, container_free_bytes
from minisgl.utils.text import counted

NODE_1 = Path("/sys/devices/system/node/node1")  # exists on a machine with several nodes (NUMA)


class _CpuPending:
    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    def wait(self) -> IdArray:
        return self._future.result().numpy()


class CpuDevice(Device):
    """The machine's cores and memory. Mutable: it owns the thread that is its stream.

    num_sharing: the ranks on this machine; each uses an equal share of cores and memory.
    num_threads: the threads that a step runs on, instead of the share of the cores.
    """

    torch_device = torch.device("cpu")
    best_chunk = 256
    """Prefill rates on 2 cores, bfloat16, in chunks of 64, 128, 256, 512 and 1,024 tokens: 7,270,
    10,273, 11,751, 11,317 and 9,615 tokens/s (the built-in model); 154, 180, 280, 229 and 146 on a
    busy machine (Qwen3-0.6B shapes). Larger chunks fall out of the cache."""
    measured_sizes = (16, 32, 64, 128, 256)
    measuring_s = 0.5
    """With as much for the number of threads, start-up measures for about a second."""
    default_memory_ratio = 0.5  # lower than on a GPU, because other programs use this memory too
    KV_SHARE = 0.25
    """Of the machine's memory, for the KV cache: other programs and the file cache need the rest.
    """

    def __init__(self, num_sharing: int = 1, num_threads: int | None = None) -> None:
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu-stream")
        self._num_sharing = num_sharing
        total = min(psutil.virtual_memory().total, container_bytes())
        self.kv_limit_bytes = int(total * self.KV_SHARE) // num_sharing
        self._runner: Runner = EagerRunner()
        share = max(min(torch.get_num_threads(), container_cores()) // num_sharing, 1)
        self.max_threads = share if num_threads is None else 0
        self._num_threads = num_threads or share
        if NODE_1.exists() and (interleave := plugins.find("memory", "interleave")):
            interleave()  # before the stream's thread starts: threads inherit it
        if self._num_threads != torch.get_num_threads():
            self.set_threads(self._num_threads)

    def peak_memory_bytes(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # KiB on other systems

    def free_bytes(self) -> int:
        return min(psutil.virtual_memory().available, container_free_bytes()) // self._num_sharing

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        placed = self._runner.place(arrays)
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in placed]

    def enqueue(self, work: Callable[[], Tensor]) -> Pending:
        return _CpuPending(self._stream.submit(_inference, work))

    def create_runner(self, max_graph_rows: int, max_prompt_tokens: int, ops: Any) -> Runner:
        create = None
        if max_graph_rows:
            create = plugins.find("runners", "recorded", ops=ops.name)
        self._runner = create(ops, max_graph_rows) if create else EagerRunner()
        return self._runner

    def set_threads(self, count: int) -> None:
        """Set the number for the stream's thread only; OpenMP keeps one for each thread. For other
        threads it stays as the user set it."""
        default = torch.get_num_threads()
        self._stream.submit(torch.set_num_threads, count).result()
        torch.set_num_threads(default)  # for threads that start later

    def is_out_of_memory(self, error: BaseException) -> bool:
        said = ("can't allocate memory", "bad_alloc")  # of torch, and of the C++ kernels
        return isinstance(error, MemoryError) or any(text in str(error) for text in said)

    def describe(self) -> str:
        # For a single rank, `engine.startup.measure` logs the number of threads.
        threads = f", {counted(self._num_threads, 'thread')} a rank"
        return "CPU" + (threads if self._num_sharing > 1 else "")

    def close(self) -> None:
        self._stream.shutdown()
        self._runner = EagerRunner()  # recordings hold the pool

    def release(self) -> None:
        """Make malloc return its free memory to the system, if it can (glibc). It keeps some for
        each thread."""
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def _inference(work: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():  # thread-local, so it is entered on the stream's thread
        return work()
