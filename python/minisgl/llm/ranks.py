"""The engine of an `LLM` with several ranks: each rank is a process, as in a server.

The `LLM` takes the place of the tokenizers and the API server. Its messages go to rank 0's inbox,
and rank 0's events come back, over sockets in a private folder.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref

from minisgl import env, plugins
from minisgl.errors import ConfigError
from minisgl.llm.session import Session
from minisgl.message import DetokenizeMsg, ExitMsg
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.workers import Workers
from minisgl.utils.zmq import PullQueue, PushQueue

POLL_S = 0.1  # while no event arrives, dead ranks and Ctrl-C are checked this often


class OwnRanks:
    """An engine of `args.tp` processes. They end when `close` is called, when this object is
    deleted, or with the program."""

    def __init__(self, args: RuntimeArgs) -> None:
        """Raises ConfigError or StartupFailed, which name the cause."""
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                f"LLM(tp={args.tp}) starts {args.tp} processes, which a daemonic process, as "
                "multiprocessing.Pool has them, must not: make it in the main process or in one of "
                "concurrent.futures.ProcessPoolExecutor, or use tp=1"
            )
        if check := plugins.find("checks", "checkpoint"):
            check(args.folder, args)
        self._workers = Workers(log_level=env.log_level(default="warning"))
        endpoints = self._workers.endpoints
        self._events: PullQueue[DetokenizeMsg] = PullQueue(endpoints.detokenizer, DetokenizeMsg)
        self._messages = PushQueue(endpoints.scheduler)
        self._end = weakref.finalize(
            self, _end, os.getpid(), self._workers, self._events, self._messages
        )
        try:
            self._workers.start_engine(args)
            self._workers.wait_ready()
            self.context = int(self._workers.info["context_length"])
        except BaseException:
            self.close()
            raise

    def run(self, session: Session) -> None:
        """Run until the session sends an `ExitMsg`. Raises WorkerDied or WorkerHung."""
        while True:
            messages = session.take(0)
            if any(isinstance(message, ExitMsg) for message in messages):
                return  # for the session alone; the ranks keep running
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
        return  # this is a fork of the program; the ranks belong to its parent
    workers.end()
    for queue in queues:
        queue.close()
