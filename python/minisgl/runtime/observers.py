"""What may observe the loop of a rank: the rows of the table `loop_observers`.

A row's object is called with the options and the rank's number before the engine is built, so that
it can refuse an option at once. It returns a `LoopObserver`, or None if there is nothing to
observe. Observers see the loop through its `Inbox`, `Outbox`, `Executor` and `LoopMeter`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl import plugins
from minisgl.core.plan import Executor
from minisgl.message import Control, Report, StatusReply
from minisgl.runtime.args import RuntimeArgs
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.io import Source
from minisgl.scheduler.loop import Inbox, Outbox
from minisgl.scheduler.meter import LoopMeter
from minisgl.utils.process import WorkerStatus

if TYPE_CHECKING:
    from minisgl.engine import Engine

TextOf = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What an observer of a rank's loop may use.

    send: sends a record to the API process. text_of: returns the text of token ids. args: the
    options. scheduler: returns the rank's, once the loop runs. status: the process's
    heartbeats.
    """

    engine: Engine
    meter: LoopMeter
    send: Callable[[Report], None]
    text_of: TextOf
    args: RuntimeArgs
    scheduler: Callable[[], Scheduler]
    status: WorkerStatus


class LoopObserver:
    """Observes nothing; a subclass overrides what it needs."""

    def attach(self, seat: Seat) -> None:
        """Called once, before the loop's parts are wrapped."""

    def source(self, source: Source) -> Source:
        """Return what rank 0 receives from instead of this one. Called before `attach`."""
        return source

    def inbox(self, inbox: Inbox) -> Inbox:
        """Return the inbox that the loop uses instead of this one."""
        return inbox

    def outbox(self, outbox: Outbox) -> Outbox:
        """Return the outbox that the loop uses instead of this one."""
        return outbox

    def executor(self, executor: Executor) -> Executor:
        """Return the executor that the loop uses instead of this one."""
        return executor

    def begin(self, config: SchedulerConfig, *, overlap: bool) -> None:
        """Called once, before the first turn."""

    def reported(self, report: StatusReply) -> None:
        """Called with each report of the meter."""

    def handle(self, message: Control) -> bool:
        """Handle a message that is not for the scheduler, between two steps. Returns False for one
        of another observer."""
        return False

    def close(self) -> None:
        """Called once, when the loop has ended."""


Create = Callable[[RuntimeArgs, int], LoopObserver | None]
"""A row of the table `loop_observers`."""


def create_observers(args: RuntimeArgs) -> list[LoopObserver]:
    """Return the observers of a rank's loop. Raises ConfigError."""
    creates: list[Create] = [row.load() for row in plugins.rows("loop_observers")]
    return [made for create in creates if (made := create(args, args.rank))]
