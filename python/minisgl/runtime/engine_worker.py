"""The process of one rank: it loads the model, then runs the scheduler's loop."""

from __future__ import annotations

import time
from typing import Final

from minisgl import plugins
from minisgl.engine import Engine
from minisgl.engine.startup import start_engine
from minisgl.models.loading.reading import read_config
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import create_observers
from minisgl.runtime.rank_loop import RankLoop
from minisgl.runtime.scheduling import create_grammars, scheduler_config
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.tokenizer.defaults import end_of_sequence_ids
from minisgl.tokenizer.tokenizer import load_tokenizer
from minisgl.utils.logger import get_logger
from minisgl.utils.process import WorkerStatus
from minisgl.utils.start import StartClock
from minisgl.utils.text import size_of
from minisgl.utils.zmq import Endpoints, PushQueue

logger = get_logger(__name__)

PROGRESS_EVERY_S: Final = 2.0
"""The time between two log lines about the weights that are loaded."""


def engine_worker(args: RuntimeArgs, endpoints: Endpoints, status: WorkerStatus) -> None:
    """Serve until an `ExitMsg`. The checkpoint is at `args.folder`.

    When it is ready, rank 0 reports context_length, memory (the table), vocab_size and start_s
    (seconds of each part of its start). With --dry-run it reports only `memory`, and the process
    ends.
    """
    clock = StartClock(status.spawned_at)
    clock.lap("imports")
    folder, leads = args.folder, args.rank == 0
    if args.dry_run:
        memory: str = plugins.need("servers", "dry_run", "--dry-run")(args)
        status.ready({"memory": memory} if leads else {})
        return
    observers = create_observers(args)
    model = read_config(folder, args.quantization)  # refuses some models at once
    tokenizer = load_tokenizer(folder)
    eos_ids = end_of_sequence_ids(folder, tokenizer)
    to_scheduler = PushQueue(endpoints.scheduler)  # only the thread that compiles uses it
    grammars = create_grammars(
        lambda: tokenizer,
        model.vocab_size,
        eos_ids,
        lambda message: to_scheduler.put([message] if leads else []),
    )
    vocabulary = grammars.prepare() if grammars and not args.offline else None
    clock.lap("tokenizer")
    engine = start_engine(
        args,
        progress=_Progress() if leads else None,
        clock=clock,
        measure_steps=not args.offline or args.draft_names != "off",
    )
    loop = RankLoop(args, endpoints, engine, status, tokenizer.decode, observers)
    is_torn = False
    try:
        settings = scheduler_config(args, engine, eos_ids)
        create = grammars.create if grammars else None
        loop.use(Scheduler(settings, clock=loop.now, create_masker=create))
        if vocabulary:
            vocabulary.result()
        clock.lap("scheduler")
        status.ready(_info(engine, settings, clock) if leads else {})
        loop.run()
    except Exception:
        # Steps on the device may wait for other ranks without end.
        is_torn = args.tp > 1
        raise
    finally:
        status.pulse.rest()
        if grammars:
            grammars.close()
        to_scheduler.close()
        loop.close()
        if not is_torn:
            engine.close()
        for observer in observers:
            observer.close()


def _info(engine: Engine, settings: SchedulerConfig, clock: StartClock) -> dict[str, object]:
    return {
        "context_length": min(settings.max_seq_len, settings.num_pool_tokens),
        "memory": str(engine.memory),
        "vocab_size": settings.vocab_size,
        "start_s": clock.part_s,
    }


class _Progress:
    """Logs how much of the weights is loaded, every `PROGRESS_EVERY_S`. Mutable."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_EVERY_S
            share = 100 * done // max(total, 1)
            logger.info("loading weights: %s of %s (%d %%)", size_of(done), size_of(total), share)
