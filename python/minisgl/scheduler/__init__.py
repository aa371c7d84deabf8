"""Decides who runs: admission, steps, prefix sharing, retraction, the end of requests.

What it is for: turning messages into plans, and the outcomes of plans into events. What it does
not know: models, tensors, text, sockets; it imports no torch. Read `loop.py` first (its four
phases), then `scheduler.py` (`add`, `plan`, `commit`).
"""

from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.loop import Inbox, Outbox, run
from minisgl.scheduler.scheduler import Scheduler

__all__ = ["Inbox", "Outbox", "Scheduler", "SchedulerConfig", "run"]
