"""The worker processes of one engine. They start, become ready and end together."""

from __future__ import annotations

import gc
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, Protocol

from minisgl.core.image import NO_MEDIA, Media
from minisgl.errors import EngineError, StartupFailed, WorkerDied
from minisgl.message import ExitMsg
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.worker import Worker, start_worker
from minisgl.utils.hangs import CHECK_S, HangWatch
from minisgl.utils.logger import get_logger
from minisgl.utils.process import StartFailed, StartLine, WorkerStatus, receive_status
from minisgl.utils.zmq import Endpoints, PushQueue

logger = get_logger(__name__)

# A worker that is asked to end finishes at most one step and its clean-up first.
END_S: Final = 5.0
# A rank whose peer is gone may wait for it in a collective, which no signal interrupts.
STUCK_END_S: Final = 0.5
# The time between two looks at a thread that works while the workers start.
START_CHECK_S: Final = 0.02
# After a worker has reported a consequence, wait this long for the report of its cause.
CAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A failed start. why: the text without the name of the worker, if it has that.
    is_consequence: see `StartFailed`."""

    text: str
    why: str = ""
    is_consequence: bool = False


class Peer(Protocol):
    """The supervisor of another machine that has ranks of the engine.

    status: readable when the peer ends.
    """

    name: str
    status: Connection

    def death(self) -> EngineError | None:
        """Return why it ended; None if the user asked for it. Call this when `status` is ready."""

    def leave(self, reason: str | None) -> None:
        """Tell it that these workers end. reason: None if the user asked for it."""

    def close(self) -> None: ...


class Workers:
    """Processes that live and end together, and the folder of their sockets. Mutable: it grows."""

    def __init__(
        self, *, log_level: str | None = None, on_line: Callable[[str], None] | None = None
    ) -> None:
        """log_level: of the workers; None for the environment's. on_line: called with each line of
        their log, of level info or above, while `wait_ready` waits for them."""
        self._log_level = log_level
        self._on_line = on_line
        self.reset()

    def reset(self) -> None:
        """Drop the workers that have ended, so that others can start."""
        self.endpoints = Endpoints.create()
        self.processes: list[Worker] = []
        self.info: dict[str, Any] = {}  # what the workers reported when they were ready
        self.nodes: Sequence[Peer] = ()  # they end with these workers
        self._ranks: list[Worker] = []  # this node's ranks, if the engine has several
        self._leads = True
        self._is_ready = False
        self._has_hung = False
        self._hang_watch: HangWatch | None = None  # from `start_engine` on
        self._started_at = time.monotonic()

    def start_engine(self, args: RuntimeArgs) -> None:
        """Start this node's ranks. The checkpoint is at `args.folder`."""
        self._hang_watch = HangWatch(args.hang_timeout, is_spread=args.num_local < args.tp)
        args = replace(args, store=self.endpoints.store)
        if args.tp == 1:
            self._start("engine", partial(_engine, args, self.endpoints))
            return
        for rank in args.local_ranks:
            self._start(
                f"engine-{rank}", partial(_engine, replace(args, rank=rank), self.endpoints)
            )
        self._ranks = self.processes[-args.num_local :]
        self._leads = 0 in args.local_ranks

    def start_text(
        self,
        folder: Path,
        num_tokenizers: int,
        *,
        tool_call_parser: str | None = None,
        media: Media = NO_MEDIA,
        dry_run: bool = False,
    ) -> None:
        """Start `num_tokenizers` tokenizers and a detokenizer, or one process for both if it is 0.

        dry_run: they load, report that they are ready, and end.
        """
        text = partial(_text, folder, self.endpoints, tool_call_parser, media, dry_run)
        for index in range(num_tokenizers):
            self._start(f"tokenizer-{index}", partial(text, index, False))
        if num_tokenizers:
            self._start("detokenizer", partial(text, None, True))
        else:
            self._start("tokenizer", partial(text, 0, True))

    def _start(self, name: str, body: Callable[[WorkerStatus], None]) -> None:
        tells = self._on_line is not None
        worker = start_worker(
            name, body, log_level=self._log_level, folder=self.endpoints.folder, tells=tells
        )
        self.processes.append(worker)

    def wait_while(self, thread: threading.Thread) -> None:
        """Wait until `thread` has ended. Raises StartupFailed as soon as a worker has ended."""
        while thread.is_alive():
            if wait([worker.process.sentinel for worker in self.processes], START_CHECK_S):
                self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until each worker is ready.

        Raises StartupFailed, which names each cause, but not its consequences in other workers. A
        worker that is ready may end before the others are only without an error (a dry run).
        """
        waiting, ready = self.processes[:], list[Worker]()
        failures: list[_Failure] = []
        causes: list[_Failure] = []
        while waiting and not causes:
            statuses = [worker.status for worker in waiting]
            statuses += [node.status for node in self.nodes]
            ends = [worker.process.sentinel for worker in ready]
            readable = wait([*statuses, *ends], CAUSE_S if failures else None)
            if not readable:
                break
            deaths = [worker.death() for worker in ready if worker.process.sentinel in readable]
            failures += [_Failure(text=str(d)) for d in deaths if d.exit_code]
            ready = [worker for worker in ready if worker.process.sentinel not in readable]
            failures += [
                _Failure(text=str(node.death() or f"{node.name} has ended"))
                for node in self.nodes
                if node.status in readable
            ]
            for worker in [worker for worker in waiting if worker.status in readable]:
                status = self._await_status(worker)
                if isinstance(status, StartLine):
                    continue
                waiting.remove(worker)
                if status:
                    failures.append(status)
                else:
                    ready.append(worker)
            causes = [failure for failure in failures if not failure.is_consequence]
        if failures:
            # All text workers may report one error of the tokenizer, and all ranks one error with
            # other numbers, for example of free memory. Show only the first report.
            different: dict[str, str] = {}
            for failure in causes or failures:
                why = failure.why or failure.text
                different.setdefault(re.sub(r"[\d.,]+", "", why), failure.text)
            raise StartupFailed("; ".join(different.values()))
        self._is_ready = True

    def _await_status(self, worker: Worker) -> _Failure | StartLine | None:
        """Read the worker's report. Returns None if it is ready, a line if it still starts."""
        try:
            status = receive_status(worker.status)
        except EOFError:
            return _Failure(text=str(worker.death()))
        if isinstance(status, StartLine):
            if self._on_line:
                self._on_line(status.text)
            return status
        if isinstance(status, StartFailed):
            kind = "engine" if worker in self._ranks else worker.name
            return _Failure(
                text=f"the {kind} could not start: {status.message}",
                why=status.message,
                is_consequence=status.is_consequence,
            )
        seconds = time.monotonic() - self._started_at
        pid = worker.process.pid
        logger.info("the %s is ready after %.1f s (pid %d)", worker.name, seconds, pid)
        self.info |= status.info
        return None

    def check(self) -> None:
        """Raise WorkerDied if a worker has ended, WorkerHung if one hangs."""
        ended = wait([w.process.sentinel for w in self.processes], 0)
        if ended:
            raise _cause([w.death() for w in self.processes if w.process.sentinel in ended])
        self.check_hangs()

    def check_hangs(self) -> None:
        """Kill a worker that hangs, and raise WorkerHung. Call this every `CHECK_S`."""
        if self._hang_watch and (hung := self._hang_watch.check(self.processes)):
            worker, error = hung
            worker.process.kill()  # it cannot end by itself
            self._has_hung = True
            raise error

    def stalled(self) -> str | None:
        """Return a sentence about a worker that makes no progress, by the last check, if any."""
        return self._hang_watch.stalled(self.processes) if self._hang_watch else None

    def wait_ended(self) -> None:
        """Wait until every worker has ended by itself, or another node reports its end.

        Raises EngineError if a worker or a node ended with an error, or if a worker hangs.
        """
        running = self.processes[:]
        nodes = [node.status for node in self.nodes]
        while running:
            ended = wait([*(worker.process.sentinel for worker in running), *nodes], CHECK_S)
            deaths = [w.death() for w in running if w.process.sentinel in ended]
            if any(death.exit_code for death in deaths):
                raise _cause(deaths)
            running = [w for w in running if w.process.sentinel not in ended]
            self.check_hangs()
            for node in self.nodes:
                if node.status in ended:
                    if death := node.death():
                        raise death
                    return

    def end(self, reason: str | None = None) -> None:
        """Ask the workers to end, kill those that do not, and remove the sockets.

        reason: for the other nodes, if the user did not ask for the end.
        """
        is_whole = (
            self._is_ready
            and reason is None
            and not self._has_hung
            and all(worker.process.exitcode is None for worker in self.processes)
        )
        leaving = self._ranks if is_whole else []
        for node in self.nodes:
            node.leave(reason)
        if leaving and self._leads:
            # With this message all ranks leave in the same turn, between two steps. A signal could
            # end one of them during a step.
            queue = PushQueue(self.endpoints.scheduler)
            queue.put([ExitMsg()])
            queue.close()
        for worker in self.processes:
            if not self._is_ready:  # it has nothing to clean up, and may be stuck
                worker.process.kill()
            elif worker not in leaving:
                worker.process.terminate()
        may_be_stuck = bool(self._ranks) and self._is_ready and not is_whole
        deadline = time.monotonic() + (STUCK_END_S if may_be_stuck else END_S)
        for worker in self.processes:
            # A program that ignores SIGCHLD gets no exit code, so wait for the sentinel.
            if not wait([worker.process.sentinel], max(deadline - time.monotonic(), 0)):
                if not may_be_stuck:
                    logger.warning("the %s does not end; killing it", worker.name)
                worker.process.kill()
            worker.process.join()
        for node in self.nodes:
            node.close()
        self.endpoints.remove()

    def kill(self) -> None:
        """Kill the workers, and remove the sockets."""
        for worker in self.processes:
            worker.process.kill()
        self.endpoints.remove()


def _cause(deaths: list[WorkerDied]) -> WorkerDied:
    """Return the death that caused the others: a signal (negative) rather than an error, and that
    rather than an end without one."""
    return min(deaths, key=lambda death: death.exit_code or math.inf)


def _engine(args: RuntimeArgs, endpoints: Endpoints, status: WorkerStatus) -> None:
    gc.disable()  # would take a fifth of the time: torch makes many objects, and none is garbage
    from minisgl.runtime.engine_worker import engine_worker

    gc.enable()
    engine_worker(args, endpoints, status)


def _text(
    folder: Path,
    endpoints: Endpoints,
    tool_call_parser: str | None,
    media: Media,
    dry_run: bool,
    index: int | None,
    detokenizer: bool,
    status: WorkerStatus,
) -> None:
    from minisgl.tokenizer.worker import TextWorkerConfig, tokenize_worker

    config = TextWorkerConfig(
        folder=folder,
        endpoints=endpoints,
        tokenizer_index=index,
        detokenizer=detokenizer,
        tool_call_parser=tool_call_parser,
        media=media,
        dry_run=dry_run,
    )
    tokenize_worker(config, status)
