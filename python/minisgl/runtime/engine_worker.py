"""The process of one rank: load the model, then run the scheduler's loop over it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from minisgl import env
from minisgl.builtin import model_path
from minisgl.core.executor import Executor
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.startup import start_engine
from minisgl.message import StatusReply, StepBroadcastMsg
from minisgl.models import ModelConfig
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.controls import Controls
from minisgl.runtime.dry_run import dry_run
from minisgl.runtime.grammars import Grammars
from minisgl.runtime.scheduler_config import scheduler_config
from minisgl.runtime.watched_loop import WatchedLoopMeter
from minisgl.scheduler import Scheduler, run
from minisgl.scheduler.io import (
    FollowerOutbox,
    Message,
    NoOutbox,
    Source,
    SourceInbox,
    ZmqOutbox,
)
from minisgl.scheduler.loop import WAIT, Inbox, Outbox
from minisgl.scheduler.report import StatusLine, StepLog
from minisgl.scheduler.step_broadcast import CHECK_EVERY, Follower, Leader
from minisgl.tokenizer.defaults import end_of_sequence_ids
from minisgl.tokenizer.tokenizer import load_tokenizer
from minisgl.utils.logger import get_logger
from minisgl.utils.process import WorkerStatus
from minisgl.utils.start import StartClock
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue

logger = get_logger(__name__)

PROGRESS_EVERY_S = 2.0  # how often the log says how much of a large model is loaded


def engine_worker(args: RuntimeArgs, endpoints: Endpoints, rank: int, status: WorkerStatus) -> None:
    """Serve until an `ExitMsg`. `args.model` is a folder, or None for the built-in model.

    After an error a rank that is not alone leaves its device as it is: work that is queued there
    may wait for other ranks without end.

    Rank 0 reports, when it is ready: num_pages, page_size, max_seq_len, max_prefill_tokens, memory
    (the table), start_s (seconds of each part of its start). With --dry-run it reports only
    `memory`, and the process ends.
    """
    clock = StartClock(status.spawned_at)
    clock.lap("imports")
    folder = Path(args.model) if args.model else model_path()
    config = EngineConfig.of(
        args, folder, rank=rank, num_local=args.num_local, store=endpoints.store
    )
    leads, overlap = rank == 0, not env.overlap_disabled()
    if args.dry_run:
        memory = dry_run(config)
        status.ready({"memory": memory} if leads else {})
        return
    step_log = StepLog(Path(args.log_steps)) if args.log_steps and leads else None
    tokenizer = load_tokenizer(folder)
    eos_ids = end_of_sequence_ids(folder, tokenizer)
    to_scheduler = PushQueue(endpoints.scheduler)  # its own, of the thread that compiles
    grammars = Grammars(
        lambda: tokenizer,
        ModelConfig.from_folder(folder, args.quantization).vocab_size,
        eos_ids,
        lambda message: to_scheduler.put([message] if leads else []),
    )
    vocabulary = None if args.offline else grammars.prepare()
    clock.lap("tokenizer")
    engine = start_engine(
        config,
        progress=_Progress() if leads else None,
        clock=clock,
        measure_steps=not args.offline,
    )

    def observed(source: Source) -> Source:
        """Let rank 0 end requests that wait too long, and plan late."""
        if args.max_queue_wait:
            from minisgl.scheduler.queue_wait import QueueWait

            source = QueueWait(source, args.max_queue_wait, lambda: scheduler.requests.queued)
        if overlap and not args.offline:
            from minisgl.scheduler.late_planning import LONG_STEP_S, LatePlanning

            times = engine.tuning.step_times
            is_long = times is not None and times.step_s(1) >= LONG_STEP_S
            source = LatePlanning(
                source,
                lambda: meter.flight(),
                lambda: meter.lap(WAIT),
                for_all=is_long and engine.device.torch_device.type == "cpu",
            )
        return source

    source, executor, now = _links(engine, endpoints, config.ranks, observed)
    outbox = _outbox(args, endpoints, rank)

    text_of = tokenizer.decode if args.xray_text else None
    controls = Controls(engine, outbox, status, Path(args.profile_dir), text_of)
    inbox = SourceInbox(source, controls)
    listeners: list[Callable[[StatusReply], None]] = [outbox.pass_on]
    if leads:
        listeners += [StatusLine(), *([step_log.flush] if step_log else [])]
    meter = WatchedLoopMeter(
        status.pulse,
        engine.tuning.step_times,
        rank=rank,
        on_report=listeners,
        on_step=step_log,
        peak_memory_bytes=engine.device.peak_memory_bytes,
    )
    controls.meter = meter
    recorder = None
    loop_inbox: Inbox = inbox
    loop_outbox: Outbox = outbox
    if args.record and leads:
        from minisgl.scheduler.recorder import RecordedInbox, RecordedOutbox, Recorder
        from minisgl.scheduler.xray import XRay

        recorder = Recorder(Path(args.record))
        loop_inbox = RecordedInbox(inbox, recorder)
        loop_outbox = RecordedOutbox(outbox, recorder)
        meter.watcher = XRay(controls.send_frame, meter.epoch, recorder.frame, text_of)
    if leads and args.nnodes == 1:
        executor, loop_outbox = _costed(engine, args.num_local, executor, loop_outbox)
    is_torn = False
    try:
        settings = scheduler_config(
            args,
            engine,
            eos_ids,
            max_stall_s=None if args.offline else _stall_bound_s(args, engine, rank),
            max_queued=None if args.offline else args.max_queued_requests,
        )
        scheduler = Scheduler(settings, clock=now, create_masker=grammars.create)
        controls.scheduler = scheduler
        if vocabulary:
            vocabulary.result()
        clock.lap("scheduler")
        info = {
            "num_pages": engine.memory.num_pages,
            "page_size": engine.page_size,
            "max_seq_len": engine.max_seq_len,
            "max_prefill_tokens": engine.max_prefill_tokens,
            "memory": str(engine.memory),
            "start_s": clock.part_s,
        }
        status.ready(info if leads else {})
        if recorder:
            recorder.begin(settings, overlap=overlap)
        run(scheduler, executor, loop_inbox, loop_outbox, overlap=overlap, meter=meter)
    except Exception:
        is_torn = config.tp > 1
        raise
    finally:
        status.pulse.rest()
        grammars.close()
        to_scheduler.close()
        inbox.close()
        outbox.close()
        if not is_torn:
            engine.close()
        if step_log:
            step_log.close()
        if recorder:
            recorder.close()


def _costed(
    engine: Engine, num_local: int, executor: Executor, outbox: Outbox
) -> tuple[Executor, Outbox]:
    """Let the ends of requests say what they cost, where the devices' energy can be read."""
    from minisgl.runtime.energy import PowerMeter, meter_of

    meter = meter_of(engine.device.torch_device, num_local, env.powercap())
    if meter is None:
        return executor, outbox
    from minisgl.scheduler.cost import CostedExecutor, CostedOutbox, Ledger

    ledger = Ledger(PowerMeter(meter))
    return CostedExecutor(executor, ledger), CostedOutbox(outbox, ledger)


def _stall_bound_s(args: RuntimeArgs, engine: Engine, rank: int) -> float:
    """`--max-stall-ms`, or what the default chunk takes."""
    times = engine.tuning.step_times
    assert times is not None, "an engine that serves measures its steps"
    bound_s = args.max_stall_ms / 1e3 if args.max_stall_ms else times.default_stall_s
    if rank == 0:
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


def _outbox(args: RuntimeArgs, endpoints: Endpoints, rank: int) -> ZmqOutbox | NoOutbox:
    if rank == 0:
        return ZmqOutbox(endpoints)
    return FollowerOutbox(endpoints) if args.node_rank == 0 else NoOutbox()


def _links(
    engine: Engine,
    endpoints: Endpoints,
    ranks: DistributedInfo,
    observed: Callable[[Source], Source],
) -> tuple[Source, Executor, Callable[[], float]]:
    """This rank's source of messages, the executor of its plans, and its scheduler's clock.

    observed: makes rank 0's source of the queue that the messages come from.
    """
    check_every = 1 if env.check_plans() else CHECK_EVERY
    if ranks.rank > 0:
        broadcasts: PullQueue[StepBroadcastMsg] = PullQueue(
            endpoints.broadcasts(ranks.rank), StepBroadcastMsg
        )
        follower = Follower(broadcasts, engine, check_every=check_every)
        return follower, follower, lambda: follower.now
    queue: PullQueue[Message] = PullQueue(endpoints.scheduler, Message)
    source = observed(queue)
    if ranks.size == 1:
        return source, engine, time.monotonic
    followers = [PushQueue(endpoints.broadcasts(rank)) for rank in range(1, ranks.size)]
    leader = Leader(source, engine, followers, check_every=check_every)
    return leader, leader, time.monotonic


class _Progress:
    """Logs how much of the weights is loaded, every `PROGRESS_EVERY_S`. Mutable."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_EVERY_S
            logger.info("weights: %d %% of %.2f GiB", 100 * done // max(total, 1), total / 2**30)
