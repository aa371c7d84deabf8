"""What differs between devices: memory, uploads, and the order in which work runs.

`Device` is the seam. Work handed to `enqueue` runs in order, on the device's stream, while the
caller goes on; the `Pending` that comes back is the marker to wait for. Read next: `cpu.py`, then
`cuda.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.errors import OutOfDeviceMemory


class Pending(Protocol):
    """Work that is enqueued."""

    def wait(self) -> list[int]:
        """What the work returned, on the host. Raises what the work raised."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """num_decodes: rows that decode. num_prompts, num_prompt_tokens: the other rows, and their
    tokens. longest: in a padded step, how long a prompt's context may be; else 0.
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
    """How a step's work is launched.

    decode_sizes: the numbers of rows that it pads decode steps to. prompt_sizes: the numbers of
    prompt tokens that it can pad a step with prompts to. beside_prompts: the numbers of decode rows
    beside them. max_tokens: the most of both that it pads a step with prompts to. Mutable.
    """

    decode_sizes: Sequence[int] = ()
    prompt_sizes: Sequence[int] = ()
    beside_prompts: Sequence[int] = ()
    max_tokens = 0

    @abstractmethod
    def padded(self, plan: Plan) -> StepSize | None:
        """To what the step is to be padded; None for not at all."""

    @abstractmethod
    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`. Padded steps of one shape do the same work on the same addresses."""


class EagerRunner(Runner):
    """Launch by launch."""

    def padded(self, plan: Plan) -> StepSize | None:
        return None

    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


class Device(ABC):
    """One accelerator, or the CPU.

    best_chunk: the prompt tokens of a step with the best prefill rate. measured_sizes: prompt
    tokens of the steps that are timed at the start, for a stall bound.
    num_threads: how many threads a step may run on, where that is to be chosen; else 0.
    max_graph_tokens: no `Runner.prompt_sizes` are larger. can_rehearse: whether `rehearse` can.
    """

    torch_device: torch.device
    best_chunk: int
    measured_sizes: tuple[int, ...]
    num_threads = 0
    max_graph_tokens = 0
    can_rehearse = False
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
    def create_runner(self, max_graph_rows: int, max_prompt_tokens: int) -> Runner:
        """With CUDA graphs of up to `max_graph_rows` decode rows, on a device that has them; 0:
        none. max_prompt_tokens: no step has more, so none is padded to more."""

    def warm_up_rows(self, most: int) -> list[int]:
        """Up to `most` decode rows: numbers of them whose steps take different kernels, if these
        are to be compiled before a user waits for them."""
        return []

    def rehearse(self, steps: Iterable[Callable[[], Callable[[], object]]]) -> None:
        """Have the kernels of steps compiled, side by side. A step is called as `enqueue`d work is;
        what it returns launches the kernels, none of which runs."""
        raise AssertionError("this device cannot launch without running")

    def set_threads(self, count: int) -> None:
        """Run later steps on `count` threads; only where `num_threads` is above 0."""
        raise AssertionError("this device's steps run on no threads")

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` is this device's way to say that an allocation failed."""

    @abstractmethod
    def describe(self) -> str:
        """For the log: which device, how large."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is enqueued and let go of the device."""

    @abstractmethod
    def release(self) -> None:
        """Give memory that no tensor holds back to the system. Also after `close`."""


def out_of_memory(what: str, advice: str, error: BaseException) -> OutOfDeviceMemory:
    """The error that says which option to turn, which way."""
    return OutOfDeviceMemory(f"out of memory while {what}: {advice} ({error})")
