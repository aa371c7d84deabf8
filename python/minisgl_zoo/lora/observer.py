"""Answers, between two steps of each rank, whether an adapter can be used."""

from __future__ import annotations

from pathlib import Path

from minisgl.core import Failed
from minisgl.errors import ConfigError, InvalidRequest
from minisgl.message import AdapterMsg, AdapterReply, Control
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver, Seat


class AdapterChecks(LoopObserver):
    def attach(self, seat: Seat) -> None:
        self._seat = seat

    def handle(self, message: Control) -> bool:
        if not isinstance(message, AdapterMsg):
            return False
        failed = None
        try:
            assert self._seat.engine.adapters, "the engine has slots"
            self._seat.engine.adapters.check(Path(message.adapter.folder))
        except ConfigError as error:
            refused = InvalidRequest(str(error), param="lora_path")
            failed = Failed.of(message.seq, refused)
        self._seat.send(AdapterReply(seq=message.seq, failed=failed))
        return True


def checks_of(args: RuntimeArgs, rank: int) -> AdapterChecks | None:
    """Return the observer of each rank of an engine with adapters."""
    return AdapterChecks() if args.num_slots else None
