"""Counters that the scheduler keeps since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Mutable: written by the scheduler only, read by reports.

    num_prompt_tokens and num_cached_tokens count requests when they first start.
    """

    num_steps: int = 0
    num_finished: int = 0
    num_retractions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
