"""Decode steps on a CPU, replayed from recordings of their calls (`minisgl_kernels.recording`).

A recording is valid for one number of rows and one number of threads. The first such step runs
normally, the second is recorded. A recording ends with the forward pass: sampling takes few calls,
which depend on the rows' options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.engine.device import Runner, StepSize
from minisgl.engine.inputs import StepShape
from minisgl.kernel.cpu import CpuOps
from minisgl.utils.logger import get_logger
from minisgl_kernels.recording import Calls, Recording

logger = get_logger(__name__)

MOST_ROWS = 64
"""The most rows of a recorded step. With more rows, the time between calls is a small part."""
UPLOAD_BYTES = 1 << 20
"""The bytes of a step's arrays that get fixed addresses. Later arrays are not copied, so their
addresses vary. The arrays of a decode step's forward pass come first, and are small."""


class Places:
    """Fixed addresses for a step's arrays: equal sizes give equal addresses. Mutable.

    are_needed: False once it is clear that no step can be recorded. Arrays are then not copied.
    """

    def __init__(self) -> None:
        self.are_needed = True
        self._bytes = np.zeros(UPLOAD_BYTES, np.uint8)

    def place(self, arrays: Sequence[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
        if not self.are_needed:
            yield from arrays
            return
        at = 0
        for array in arrays:
            place = np.ascontiguousarray(array)
            if at + array.nbytes <= UPLOAD_BYTES:
                place = self._bytes[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
                place[...] = array
                at += -(-array.nbytes // 64) * 64
            yield place


class RecordingRunner(Runner):
    """Pads nothing. Mutable: the recordings, by rows and threads."""

    samples = False

    def __init__(self, calls: Calls, max_rows: int) -> None:
        self._calls = calls
        self._places = Places()
        self._max_rows = min(max_rows, MOST_ROWS)
        self._recordings: dict[tuple[int, int], Recording | None] = {}

    def place(self, arrays: Sequence[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
        return self._places.place(arrays)

    def padded(self, plan: Plan) -> StepSize | None:
        num_rows = plan.num_rows
        is_recorded = plan.num_decodes == num_rows <= self._max_rows
        return StepSize(num_rows, 0, 0) if is_recorded else None

    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        if not isinstance(shape, StepShape):
            return compute()
        key = (shape.size.num_rows, torch.get_num_threads())
        if key not in self._recordings:
            output = compute()
            self._recordings[key] = None  # only now: after a failed step the next one is the first
            return output
        recording = self._recordings[key]
        if recording:
            return recording.replay()
        output, self._recordings[key] = self._calls.record(compute)
        if not self._recordings[key]:
            rows = shape.size.num_rows
            logger.debug("steps of %d rows and more are not replayed: they have ops of torch", rows)
            self._max_rows = rows - 1
            self._places.are_needed = self._max_rows > 0
        return output


def create_runner(ops: CpuOps, max_rows: int) -> RecordingRunner:
    """Return the runner of `minisgl_kernels.recording.create_ops`. max_rows: of a step that is
    recorded."""
    return RecordingRunner(ops.calls, max_rows)
