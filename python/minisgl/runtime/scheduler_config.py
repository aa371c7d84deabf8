"""Makes the scheduler's settings from the options and the engine."""

from __future__ import annotations

from minisgl.engine import Engine
from minisgl.runtime.args import RuntimeArgs
from minisgl.scheduler import SchedulerConfig
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def scheduler_config(args: RuntimeArgs, engine: Engine, eos_ids: frozenset[int]) -> SchedulerConfig:
    """Return the settings. eos_ids: those that the model's vocabulary lacks are left out, because
    it cannot sample them.

    Unless `args.offline`, the engine must have been started with `measure_steps`.
    """
    return SchedulerConfig(
        groups=engine.memory.groups,
        page_size=engine.page_size,
        max_seq_len=engine.max_seq_len,
        vocab_size=engine.model_config.vocab_size,
        eos_ids=frozenset(id for id in eos_ids if id < engine.model_config.vocab_size),
        max_prefill_tokens=engine.max_prefill_tokens,
        max_stall_s=None if args.offline else _stall_bound_s(args, engine),
        step_times=engine.tuning.step_times,
        max_running=engine.max_running,
        max_queued=None if args.offline else args.max_queued_requests,
        cache=args.cache,
    )


def _stall_bound_s(args: RuntimeArgs, engine: Engine) -> float:
    """Return the seconds of `--max-stall-ms`, or else of the default chunk; rank 0 logs them."""
    times = engine.tuning.step_times
    assert times is not None, "an engine that serves measures its steps"
    bound_s = args.max_stall_ms / 1e3 if args.max_stall_ms else times.default_stall_s
    if args.rank == 0:
        largest, chunk = engine.max_prefill_tokens, times.default_chunk
        logger.info(
            "prefill runs at %s tokens/s in chunks of %s, at %s in chunks of %s; the prompts of a "
            "step hold up running streams for at most %.1f ms (--max-stall-ms), and have at most "
            "%s tokens (--max-prefill-length)",
            f"{times.rate(largest):,.0f}",
            f"{largest:,}",
            f"{times.rate(chunk):,.0f}",
            f"{chunk:,}",
            bound_s * 1e3,
            f"{largest:,}",
        )
    return bound_s
