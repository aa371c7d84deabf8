"""A torch profile of some steps. Each step's name says what it computes, and for which requests.

The file has Chrome's trace format: open it in https://ui.perfetto.dev. While a profile runs, each
step is also an NVTX range, for Nsight Systems.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.errors import EngineError, InvalidRequest
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted

logger = get_logger(__name__)

NUM_NAMED: Final = 16  # the most uids in a step's name


class StepProfiler:
    """Mutable: a profile runs, or not. One thread starts and stops it."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        self._num_steps = 0

    def named(self, plan: Plan, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return `work`, the step of `plan`; while a profile runs, with a name."""
        if self._profile is None:
            return work
        self._num_steps += 1
        return partial(_run_named, _name(plan), work)

    def start(self) -> None:
        """Start a profile. Raises InvalidRequest (409) if one is running, EngineError if torch
        cannot start one."""
        if self._profile is not None:
            raise _conflict("a profile is running already; POST /stop_profile ends it")
        # The profile shows the thread that is the CPU's stream, and the loop's thread.
        all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        try:
            profile = torch.profiler.profile(experimental_config=all_threads)
            profile.start()
        except (OSError, RuntimeError) as error:
            raise EngineError(f"cannot start torch's profiler: {_reason(error)}") from error
        self._profile, self._num_steps = profile, 0

    def stop(self, folder: Path, rank: int) -> tuple[Path, int]:
        """Write the trace. Returns its path and its number of steps. No step may be in flight.

        Raises InvalidRequest (409) if no profile runs, EngineError if the file cannot be written.
        """
        if self._profile is None:
            raise _conflict("no profile is running; POST /start_profile starts one")
        profile, self._profile = self._profile, None
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = folder / f"{stamp}-rank{rank}.json"
        try:
            profile.stop()
            folder.mkdir(parents=True, exist_ok=True)
            for number in count(2):  # two profiles may end in one second
                with contextlib.suppress(FileExistsError):
                    path.touch(exist_ok=False)  # if this fails, the error says why
                    break
                path = folder / f"{stamp}-{number}-rank{rank}.json"
            _write(profile, path)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"cannot write the trace {path}: {_reason(error)}") from error
        logger.info("a profile of %s is in %s", counted(self._num_steps, "step"), path)
        return path, self._num_steps


def _write(profile: torch.profiler.profile, path: Path) -> None:
    """Write the whole trace or nothing. Raises OSError also for failures that torch only logs.

    path: an empty file. torch writes another file and renames it, so `path` is never half-written.
    """
    try:
        profile.export_chrome_trace(str(path))
        if not (path.exists() and path.stat().st_size):
            raise OSError("torch could not write all of it; is the disk full?")
    except (OSError, RuntimeError):
        for left in (path, path.with_name(f"{path.name}.tmp")):
            with contextlib.suppress(OSError):
                left.unlink()
        raise


def _reason(error: OSError | RuntimeError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _conflict(message: str) -> InvalidRequest:
    error = InvalidRequest(message)
    error.status, error.code = 409, "profile_state"
    return error


def _run_named(name: str, work: Callable[[], Tensor]) -> Tensor:
    cuda: Any = torch.cuda  # parts of which have no annotations
    on_cuda = cuda.is_initialized()
    if on_cuda:
        cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            return work()
    finally:
        if on_cuda:
            cuda.nvtx.range_pop()


def _name(plan: Plan) -> str:
    uids = " ".join(map(str, plan.uids[:NUM_NAMED]))
    more = f" and {plan.num_rows - NUM_NAMED} more" if plan.num_rows > NUM_NAMED else ""
    prompt = plan.num_tokens - plan.num_decodes
    return f"step {plan.step}: {plan.num_decodes} decodes, {prompt} prompt tokens; {uids}{more}"
