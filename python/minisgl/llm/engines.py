"""Where an `LLM` computes: in this process, or on ranks that are processes of its own.

Both run one `Session` at a time to its end. The ranks are a server's, started and watched by the
same code, only that an `LLM` sits where the text workers and the API would: its messages go to rank
0's inbox, and rank 0's events come back, over sockets in a private folder.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from minisgl import env
from minisgl.engine import Engine
from minisgl.errors import ConfigError
from minisgl.llm.session import Session
from minisgl.message import DetokenizeMsg, ExitMsg
from minisgl.scheduler import Scheduler, run
from minisgl.server.args import ServerArgs
from minisgl.server.checkpoint import check_ranks
from minisgl.server.engine_worker import engine_config, scheduler_config
from minisgl.server.workers import Workers
from minisgl.utils.zmq import PullQueue, PushQueue

POLL_S = 0.1  # how long a dead rank, or Ctrl-C, may stay unnoticed while no event comes


class LLMEngine(Protocol):
    """What an `LLM` needs of either."""

    def run(self, session: Session) -> None:
        """Until all requests of the session have ended. After an error it is good for nothing."""

    def close(self) -> None:
        """Give memory, threads and processes back."""


class OwnEngine:
    """In this process."""

    def __init__(
        self, args: ServerArgs, folder: Path, progress: Callable[[int, int], None]
    ) -> None:
        self.engine = Engine(engine_config(args, folder, store="", rank=0), progress=progress)
        try:
            self.scheduler = Scheduler(scheduler_config(args, folder, self.engine))
        except Exception:
            self.engine.close()
            raise

    def run(self, session: Session) -> None:
        overlap = not env.overlap_disabled()
        run(self.scheduler, self.engine, session, session, overlap=overlap)

    def close(self) -> None:
        self.engine.close()


class OwnRanks:
    """As `args.tp` processes. They end with `close`, with this object or with the program."""

    def __init__(self, args: ServerArgs, folder: Path) -> None:
        """Raises ConfigError or StartupFailed, which name the cause."""
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                f"LLM(tp={args.tp}) starts {args.tp} processes, which a daemonic one, as "
                "multiprocessing.Pool has them, must not: make it in the main process or in one of "
                "concurrent.futures.ProcessPoolExecutor, or use tp=1"
            )
        engine_config(args, folder, store="", rank=0)  # what is wrong is told here
        check_ranks(folder, args)
        self._workers = Workers(log_level=env.log_level(default="warning"))
        endpoints = self._workers.endpoints
        self._events: PullQueue[DetokenizeMsg] = PullQueue(endpoints.detokenizer, DetokenizeMsg)
        self._messages = PushQueue(endpoints.scheduler)
        self._end = weakref.finalize(
            self, _end, os.getpid(), self._workers, self._events, self._messages
        )
        try:
            self._workers.start_engine(replace(args, model=str(folder)))
            self._workers.wait_ready()
        except BaseException:
            self.close()
            raise

    def run(self, session: Session) -> None:
        while True:
            messages = session.take(0)
            if any(isinstance(message, ExitMsg) for message in messages):
                return  # the ranks live on
            self._messages.put(messages)
            arrived = self._events.get(POLL_S)
            for message in arrived:
                session.send(message.events)
            if not arrived:
                self._workers.check()

    def close(self) -> None:
        self._end()


def _end(owner: int, workers: Workers, *queues: PullQueue[DetokenizeMsg] | PushQueue) -> None:
    if os.getpid() != owner:
        return  # a fork of the program ends: the ranks are not its own
    workers.end()
    for queue in queues:
        queue.close()
