"""The settings that start-up measuring finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.core.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Measured once, when an engine starts; equal on all ranks.

    num_threads: CPU threads that steps run on; None leaves torch's number. graph_tokens: the most
    tokens of a step with prompts that is replayed from a CUDA graph. step_times: how long steps
    take; None if it was not measured.
    """

    num_threads: int | None = None
    graph_tokens: int = 0
    step_times: StepTimes | None = None
