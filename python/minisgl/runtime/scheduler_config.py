"""Makes the scheduler's settings from the engine and its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.core.args import EngineArgs
from minisgl.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from minisgl.engine import Engine


def scheduler_config(
    args: EngineArgs,
    engine: Engine,
    eos_ids: frozenset[int],
    *,
    max_stall_s: float | None = None,
    max_queued: int | None = None,
) -> SchedulerConfig:
    """Return the settings. max_stall_s, max_queued: None for no bound. eos_ids: those that the
    model's vocabulary lacks are left out, because it cannot sample them.

    A stall bound needs an engine that was started with `measure_steps`.
    """
    return SchedulerConfig(
        groups=engine.memory.groups,
        page_size=engine.page_size,
        max_seq_len=engine.max_seq_len,
        vocab_size=engine.model_config.vocab_size,
        eos_ids=frozenset(id for id in eos_ids if id < engine.model_config.vocab_size),
        max_prefill_tokens=engine.max_prefill_tokens,
        max_stall_s=max_stall_s,
        step_times=engine.tuning.step_times,
        max_running=engine.max_running,
        max_queued=max_queued,
        cache=args.cache,
    )
