"""The process of one engine rank: loads the model, then runs the scheduler's loop over it."""

from __future__ import annotations

import time
from pathlib import Path

from minisgl import env
from minisgl.builtin import model_path
from minisgl.core import Failed
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.device import create_device
from minisgl.engine.engine import plan_engine_memory, resolve_dtype
from minisgl.errors import MinisglError
from minisgl.message import ProfileMsg, ProfileReply
from minisgl.models import ModelConfig
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.io import ZmqInbox, ZmqOutbox
from minisgl.scheduler.meter import LoopMeter
from minisgl.scheduler.report import StatusLine, StepLog
from minisgl.server.args import ServerArgs
from minisgl.tokenizer.defaults import end_of_sequence_ids
from minisgl.tokenizer.tokenizer import load_tokenizer
from minisgl.utils.logger import get_logger
from minisgl.utils.process import WorkerStatus
from minisgl.utils.zmq import Endpoints

logger = get_logger(__name__)

PROGRESS_EVERY_S = 2.0  # loading a large model says how far it is this often


def engine_worker(args: ServerArgs, endpoints: Endpoints, rank: int, status: WorkerStatus) -> None:
    """`args.model` is a folder by now (None: the built-in model). Returns on an `ExitMsg`.

    Ready info: num_pages, page_size, max_seq_len, max_prefill_tokens, memory (the table); with
    --dry-run only `memory`, and the process ends.
    """
    folder = Path(args.model) if args.model else model_path()
    config = engine_config(args, folder)
    if args.dry_run:
        status.ready({"memory": _dry_run(config)})
        return
    step_log = StepLog(Path(args.log_steps)) if args.log_steps else None
    engine = Engine(config, progress=_Progress())
    outbox = ZmqOutbox(endpoints)

    def on_profile(message: ProfileMsg) -> None:
        outbox.pass_on(_profile(message, engine, Path(args.profile_dir), rank))

    inbox = ZmqInbox(endpoints, on_profile)
    meter = LoopMeter(
        rank=rank,
        on_report=[outbox.pass_on, StatusLine(), *([step_log.flush] if step_log else [])],
        on_step=step_log,
    )
    try:
        scheduler = Scheduler(scheduler_config(args, folder, engine))
        status.ready(
            {
                "num_pages": engine.memory.num_pages,
                "page_size": engine.page_size,
                "max_seq_len": engine.max_seq_len,
                "max_prefill_tokens": engine.max_prefill_tokens,
                "memory": engine.memory.table(),
            }
        )
        run(scheduler, engine, inbox, outbox, overlap=not env.overlap_disabled(), meter=meter)
    finally:
        inbox.close()
        outbox.close()
        engine.close()
        if step_log:
            step_log.close()


def engine_config(args: ServerArgs, folder: Path) -> EngineConfig:
    return EngineConfig(
        folder=folder,
        dtype=args.dtype,
        device=args.device,
        attn=args.attn,
        page_size=args.page_size,
        num_pages=args.num_pages,
        memory_ratio=args.memory_ratio,
        max_running=args.max_running_requests,
        max_seq_len=args.max_seq_len,
        max_prefill_tokens=args.max_prefill_length,
        dummy_weight=args.dummy_weight,
        cuda_graph_max_bs=args.cuda_graph_max_bs,
    )


def scheduler_config(args: ServerArgs, folder: Path, engine: Engine) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=engine.memory.num_pages,
        page_size=engine.page_size,
        max_seq_len=engine.max_seq_len,
        vocab_size=engine.model_config.vocab_size,
        eos_ids=end_of_sequence_ids(folder, load_tokenizer(folder)),
        max_prefill_tokens=engine.max_prefill_tokens,
        max_running=engine.max_running,
        max_queued=args.max_queued_requests,
        cache=args.cache,
    )


def _profile(message: ProfileMsg, engine: Engine, folder: Path, rank: int) -> ProfileReply:
    try:
        if message.action == "start":
            engine.profiler.start()
            return ProfileReply(seq=message.seq)
        engine.settle()
        trace, num_steps = engine.profiler.stop(folder.resolve(), rank)
        return ProfileReply(seq=message.seq, trace=str(trace), num_steps=num_steps)
    except MinisglError as error:
        return ProfileReply(seq=message.seq, failed=Failed.of(message.seq, error))


def _dry_run(config: EngineConfig) -> str:
    device = create_device(config.device)
    try:
        model = ModelConfig.from_folder(config.folder)
        dtype = resolve_dtype(config, model, device)
        return plan_engine_memory(config, model, dtype, device).table()
    finally:
        device.close()


class _Progress:
    """Logs how much of the weights is there, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_EVERY_S
            logger.info("weights: %d %% of %.2f GiB", 100 * done // max(total, 1), total / 2**30)
