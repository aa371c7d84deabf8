"""One NVIDIA GPU: its own stream, pinned staging memory, one upload per step, events as markers.

::

    host     | plan n | launch n | settle n-1 |  plan n+1  | launch n+1 | settle n |
    stream            | upload n | step n ........................ | ids n -> host |

Only `Pending.wait` waits for the device, and only for the ids of its own step. The stream copies
them to pinned memory right after the step, and then records an event. (`upload` would wait if more
than RING steps were in flight.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core.req import IdArray
from minisgl.engine.device import Device, EagerRunner, Pending, Runner
from minisgl.engine.graph import PROMPT_TOKENS, SIZES, GraphRunner, captured
from minisgl.errors import ConfigError
from minisgl.utils.gpus import NO_CUDA

_cuda: Any = torch.cuda  # whose events and streams have no annotations

STAGING_BYTES = 8 << 20
"""Room for a step's arrays: 8,192 prompt tokens and 256 rows are 0.2 MB, masks over 151,936 tokens
for 256 rows 4.9 MB. A larger step, as a user's --max-prefill-length may make it, gets its own
memory."""
RING = 4
"""Staging buffers: at most two steps are in flight, so `upload` waits for none."""
ALIGNMENT = 16  # bytes, for vector loads
WARM_UP_ROWS = sorted({*SIZES, *range(3, 16), 20, 22, 28, 30, 40, 56, 60, 320, 512})
"""Numbers of decode rows. Between them they use all kernels of decode steps on every GPU that is
tested. `SIZES` are for padded steps, the others for engines that do not pad."""
MIN_CAPABILITY = (8, 0)
"""Ampere, the oldest GPU whose multiprocessors copy asynchronously to shared memory."""
MAX_VIEWS = 512  # the most layouts that are kept: 16 sizes of graphs in 4 staging buffers, and more

_Layout = tuple[tuple[tuple[int, ...], str], ...]


class _Ready:
    """Ids on their way to the host."""

    def __init__(self, ids: Tensor, event: torch.cuda.Event) -> None:
        self._ids, self._event = ids, event

    def wait(self) -> IdArray:
        self._event.synchronize()
        return self._ids.numpy().copy()  # a later step writes the buffer


class _Failed:
    """Work that could not be enqueued."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> IdArray:
        raise self._error


class _Staging:
    """One pinned buffer and the event of the copy that last read it. Mutable."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.array = self.buffer.numpy()
        self.copied = _cuda.Event()


@dataclass(frozen=True, slots=True)
class _Views:
    """A staging buffer and the device's, whole and array by array."""

    staging: _Staging
    source: Tensor
    target: Tensor
    host: list[npt.NDArray[Any]]
    device: list[Tensor]


class CudaDevice(Device):
    """Mutable: stream, staging ring and the pinned buffers of ids. One thread enqueues."""

    best_chunk = 8192
    """Larger chunks need more memory for activations, and throughput does not grow with them."""
    measured_sizes = PROMPT_TOKENS
    max_graph_tokens = PROMPT_TOKENS[-1]
    can_compile_only = True
    default_memory_ratio = 0.9

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(NO_CUDA)
        self.torch_device = torch.device("cuda", index)
        capability = torch.cuda.get_device_capability(self.torch_device)
        if capability < MIN_CAPABILITY:
            raise ConfigError(
                f"--device cuda: {torch.cuda.get_device_name(self.torch_device)} is of compute "
                f"capability {'.'.join(map(str, capability))}, and the kernels need "
                f"{'.'.join(map(str, MIN_CAPABILITY))} (Ampere) or later; --device cpu runs without"
            )
        torch.cuda.set_device(self.torch_device)
        self._stream = _cuda.Stream(self.torch_device)
        self._staging = [_Staging(STAGING_BYTES) for _ in range(RING)]
        self._on_device = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=self.torch_device)
        self._num_uploads = 0
        self._views: dict[tuple[int, _Layout], _Views] = {}
        self._ids: list[Tensor] = [torch.empty(0, dtype=torch.int32) for _ in range(RING)]
        self._num_works = 0

    def peak_memory_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def free_bytes(self) -> int:
        self.release()  # an earlier engine's blocks would be in the way of one large tensor
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        layout = tuple((array.shape, array.dtype.name) for array in arrays)
        ring = self._num_uploads % RING
        self._num_uploads += 1
        key = (ring, layout)
        views = self._views.pop(key, None) or self._make_views(ring, layout)
        staging = views.staging
        if staging is self._staging[ring]:
            self._views[key] = views  # now the last one; the first one was used longest ago
            if len(self._views) > MAX_VIEWS:
                del self._views[next(iter(self._views))]
        staging.copied.synchronize()
        for view, array in zip(views.host, arrays, strict=True):
            view[...] = array
        views.target.copy_(views.source, non_blocking=True)
        staging.copied.record()
        return views.device

    def _make_views(self, ring: int, layout: _Layout) -> _Views:
        """Return the views for arrays of this layout.

        `upload` keeps them, because layouts of decode steps come again and making views takes
        longer than copying into them.
        """
        offsets, end = [], 0
        for shape, dtype in layout:
            offsets.append(end)
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        fits = end <= STAGING_BYTES
        staging = self._staging[ring] if fits else _Staging(end)
        target = self._on_device if fits else torch.empty(end, dtype=torch.uint8, device="cuda")
        host, device = [], []
        for (shape, dtype), offset in zip(layout, offsets, strict=True):
            where = slice(offset, offset + math.prod(shape) * np.dtype(dtype).itemsize)
            host.append(staging.array[where].view(dtype).reshape(shape))
            device.append(target[where].view(getattr(torch, dtype)).view(shape))
        return _Views(staging, staging.buffer[:end], target[:end], host, device)

    def enqueue(self, work: Callable[[], Tensor]) -> Pending:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                ids = work()
            except Exception as error:  # `wait` raises it
                return _Failed(error)
            return self._download(ids)

    def _download(self, ids: Tensor) -> _Ready:
        slot = self._num_works % RING
        self._num_works += 1
        if len(self._ids[slot]) < len(ids):
            self._ids[slot] = torch.empty(max(len(ids), 256), dtype=torch.int32, pin_memory=True)
        host = self._ids[slot][: len(ids)]
        host.copy_(ids, non_blocking=True)
        event = _cuda.Event()
        event.record()
        return _Ready(host, event)

    def create_runner(self, max_graph_rows: int, max_prompt_tokens: int, ops: Any) -> Runner:
        if not max_graph_rows:
            return EagerRunner()
        return GraphRunner(max_graph_rows, max_prompt_tokens)

    def warm_up_rows(self, most: int) -> list[int]:
        return [*(size for size in WARM_UP_ROWS if size < most), most]

    def compile_only(self, steps: Iterable[Callable[[], Callable[[], object]]]) -> None:
        """Capture each step in a CUDA graph: captured kernels are compiled but do not run."""
        from minisgl.kernel.triton.launch import compile_only

        def capture() -> None:
            pool, last = torch.cuda.graph_pool_handle(), None
            x = torch.zeros(8, 8, device=self.torch_device)
            x.mm(x)  # cuBLAS creates its handle here, outside of any graph
            for step in steps:
                launch = step()
                graph = torch.cuda.CUDAGraph()
                # relaxed: a library may allocate memory at its first call
                with captured(graph, pool, "relaxed"):
                    launch()
                last = graph  # keeps the memory pool alive until the next graph uses it
            del last

        with torch.inference_mode(), torch.cuda.stream(self._stream):
            compile_only(capture)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.cuda.OutOfMemoryError)

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def release(self) -> None:
        torch.cuda.empty_cache()
