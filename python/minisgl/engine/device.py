"""The interface to a device: memory, uploads, and a stream on which work runs in order.

`Device.enqueue` puts work on the device's stream and returns at once. The `Pending` that it returns
waits for the result. Read next: `cpu.py`, then `cuda.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.core.req import IdArray
from minisgl.core.step_times import StepTimes
from minisgl.errors import OutOfDeviceMemory


class Pending(Protocol):
    """Enqueued work."""

    def wait(self) -> IdArray:
        """Wait for the work and return its ids. Raises the exception that the work raised."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a step.

    num_decodes: decode rows. num_prompts, num_prompt_tokens: the other rows, and their tokens.
    longest: in a padded step, the longest context that a prompt may have, or a decode row if there
    is no prompt; 0 is any.
    """

    num_decodes: int
    num_prompts: int
    num_prompt_tokens: int
    longest: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens


class Runner(ABC):
    """Launches the work of a step, kernel by kernel or as a CUDA graph. Mutable.

    samples: `run` gets a padded decode step with its sampling, if the step's shape fixes how it
    samples; False if it always gets the forward pass only. decode_sizes: numbers of rows to which
    it pads decode steps. prompt_sizes: numbers of prompt tokens to which it can pad steps with
    prompts. beside_prompts: numbers of decode rows in such steps. max_tokens: the most tokens of a
    step with prompts that it pads. short_rows: decode steps of up to so many rows have a size for
    short contexts, and one for any (`BaseAttnBackend.short_rows`).
    """

    samples = True
    decode_sizes: Sequence[int] = ()
    prompt_sizes: Sequence[int] = ()
    beside_prompts: Sequence[int] = ()
    max_tokens = 0
    short_rows = 0

    def place(self, arrays: Sequence[npt.NDArray[Any]]) -> Iterable[npt.NDArray[Any]]:
        """Return a CPU step's arrays at the addresses where replayed work reads them."""
        return arrays

    @abstractmethod
    def padded(self, plan: Plan) -> StepSize | None:
        """Return the size to pad the step to; None for no padding."""

    @abstractmethod
    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, or replay the graph of an earlier step.

        Padded steps of one shape launch the same kernels on the same addresses. shape: None if the
        step is not padded.
        """


class EagerRunner(Runner):
    """Launches kernel by kernel. Pads nothing."""

    def padded(self, plan: Plan) -> StepSize | None:
        return None

    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


class Device(ABC):
    """One accelerator, or the CPU.

    best_chunk: the number of prompt tokens of a step at which the prefill rate is best.
    measured_sizes: the numbers of prompt tokens for which start-up times steps (the stall bound).
    measuring_s: after so many seconds it times no step again.
    max_threads: the threads that a step can use; start-up chooses 1 or this number. 0 if there is
    no choice.
    kv_limit_bytes: the most that the KV cache takes unless the user says how much; None for no
    limit. max_graph_tokens: the largest of `Runner.prompt_sizes`. can_compile_only: whether
    `compile_only` is implemented.
    """

    torch_device: torch.device
    best_chunk: int
    measured_sizes: tuple[int, ...]
    max_threads = 0
    max_graph_tokens = 0
    can_compile_only = False
    default_memory_ratio: float
    measuring_s = math.inf
    kv_limit_bytes: int | None = None

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated on the device."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Return the peak memory of this process: allocated on a GPU, resident on a CPU. Does not
        wait for the device."""

    @abstractmethod
    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Copy host arrays to device tensors of the same dtypes, in one transfer.

        Called inside `enqueue`d work, once. The tensors are valid until the next call. Calls with
        equal shapes and dtypes return tensors at equal addresses, which replays need.
        """

    @abstractmethod
    def enqueue(self, work: Callable[[], Tensor]) -> Pending:
        """Run `work` after all earlier work. `work` returns int32 ids on the device."""

    @abstractmethod
    def create_runner(self, max_graph_rows: int, max_prompt_tokens: int, ops: Any) -> Runner:
        """Return the runner.

        max_graph_rows: the most decode rows of a step that is replayed; 0 for none.
        max_prompt_tokens: the most prompt tokens of a step. ops: the `Ops` that the model calls.
        """

    def warm_up_rows(self, most: int) -> list[int]:
        """Return numbers of decode rows, up to `most`, whose steps use different kernels.

        Start-up compiles these kernels. Empty if the device compiles none.
        """
        return []

    def compile_only(self, steps: Iterable[Callable[[], Callable[[], object]]]) -> None:
        """Compile the kernels of steps in parallel, and run none.

        Each step prepares its tensors and returns a function that launches its kernels.
        """
        raise AssertionError("this device cannot compile without running")

    def set_threads(self, count: int) -> None:
        """Run later steps on `count` threads. Only if `max_threads` is above 0."""
        raise AssertionError("this device has no choice of threads")

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether `error` means that an allocation on this device failed."""

    @abstractmethod
    def describe(self) -> str:
        """Return the device's name and size, for the log."""

    @abstractmethod
    def close(self) -> None:
        """Finish the enqueued work and release the device."""

    @abstractmethod
    def release(self) -> None:
        """Return unused memory to the system. May be called after `close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The settings that start-up measures (`minisgl.engine.startup`). All ranks have the same.

    num_threads: CPU threads that steps run on; None leaves torch's number. graph_tokens: steps with
    prompts and up to this many tokens are replayed from CUDA graphs. step_times: how long steps
    take; None if it was not measured.
    """

    num_threads: int | None = None
    graph_tokens: int = 0
    step_times: StepTimes | None = None


def out_of_memory(what: str, advice: str, error: BaseException) -> OutOfDeviceMemory:
    """Return the error. what: what ran out of memory. advice: which options to change."""
    return OutOfDeviceMemory(f"out of memory while {what}: {advice} ({error})")
