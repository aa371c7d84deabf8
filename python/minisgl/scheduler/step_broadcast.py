"""The step broadcast: rank 0 sends what it received, and every rank plans the same step.

Every rank runs the same loop over a scheduler of its own. A plan is a pure function of the messages
and outcomes so far, so the ranks only need to agree on which message came in which turn::

    rank 0   | take | --beat n--> | plan | --check--> | launch | settle | take | --beat n+1--> ...
    rank r   |      <--beat n-- take | plan | <--check-- launch | settle |  <--beat n+1-- take ...

A beat is the broadcast of one turn. Sending plans instead would not be simpler: they are larger
than the messages, and each rank would still have to keep the state that a commit changes. The
price is that planning must depend on nothing else. If it did, ranks would launch different steps,
and their collectives would wait for each other without end. So each beat has a digest of all plans
before it. With overlap it arrives before a rank waits for the outcome of the last of them. A
`PlanCheck` arrives before the launch itself. A follower has to wait for it, so few steps have one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final
from zlib import crc32

import msgspec

from minisgl.core.executor import Executor, Flight
from minisgl.core.plan import Plan
from minisgl.errors import EngineError
from minisgl.message import Beat, BeatMsg, PlanCheck
from minisgl.scheduler.io import Message, Source
from minisgl.utils.zmq import PullQueue, PushQueue

CHECK_EVERY: Final = 64
"""Steps from one check to the next. A check costs rank 0 about 5 us (a plan of 256 rows) and 9 us
for each follower, and a follower cannot launch before rank 0 has planned."""


class Leader:
    """Rank 0's source of messages and its executor. Mutable: it counts turns.

    source: where messages come from. followers: one queue for each other rank. check_every: steps
    from one check of the plans to the next; the same on all ranks.
    """

    def __init__(
        self,
        source: Source,
        executor: Executor,
        followers: Sequence[PushQueue],
        *,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self._source = source
        self._executor = executor
        self._followers = followers
        self._check_every = check_every
        self._num_beats = 0
        self._digest = 0

    def get(self, timeout_s: float | None) -> Sequence[Message]:
        """Return what has arrived (`Source`), and send it to the other ranks as this turn's."""
        messages = self._source.get(timeout_s)
        now = time.monotonic()
        beat = Beat(step=self._num_beats, now=now, digest=self._digest, messages=list(messages))
        self._send(beat)
        self._num_beats += 1
        return messages

    def launch(self, plan: Plan) -> Flight:
        self._digest = digest(plan, self._digest)
        if plan.step % self._check_every == 0:
            self._send(PlanCheck(step=plan.step, digest=self._digest))
        return self._executor.launch(plan)

    def close(self) -> None:
        self._source.close()
        for follower in self._followers:
            follower.close()

    def _send(self, message: BeatMsg) -> None:
        for follower in self._followers:
            follower.put([message])


class Follower:
    """Another rank's source of messages and its executor. Mutable: it counts turns.

    now: rank 0's clock, as the last beat has it.
    """

    def __init__(
        self,
        beats: PullQueue[BeatMsg],
        executor: Executor,
        *,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self.now = 0.0
        self._beats = beats
        self._executor = executor
        self._check_every = check_every
        self._num_beats = 0
        self._digest = 0
        self._arrived: deque[BeatMsg] = deque()

    def get(self, timeout_s: float | None) -> Sequence[Message]:
        """Wait for this turn's beat and return its messages. Rank 0 knows when to sleep.

        Raises EngineError if another beat comes, or if rank 0 has launched other plans.
        """
        beat = self._next()
        if isinstance(beat, PlanCheck):
            raise EngineError(
                f"the ranks' plans differ: rank 0 planned step {beat.step}, this rank did not"
            )
        if beat.step != self._num_beats:
            raise EngineError(f"beat {beat.step} came where {self._num_beats} was expected")
        if beat.digest != self._digest:
            raise EngineError(
                f"the ranks' plans differ: rank 0 comes to beat {beat.step} with digest "
                f"{beat.digest:08x}, this rank with {self._digest:08x}"
            )
        self._num_beats += 1
        self.now = beat.now
        return beat.messages

    def launch(self, plan: Plan) -> Flight:
        """Launch the step. Raises EngineError if rank 0 has planned another."""
        self._digest = digest(plan, self._digest)
        if plan.step % self._check_every == 0:
            ours, theirs = PlanCheck(step=plan.step, digest=self._digest), self._next()
            if theirs != ours:
                planned = (
                    f"rank 0 planned step {theirs.step} with digest {theirs.digest:08x}"
                    if isinstance(theirs, PlanCheck)
                    else "rank 0 planned nothing"
                )
                raise EngineError(
                    f"the ranks' plans differ: {planned}, this rank step {ours.step} with digest "
                    f"{ours.digest:08x}"
                )
        return self._executor.launch(plan)

    def close(self) -> None:
        self._beats.close()

    def _next(self) -> BeatMsg:
        while not self._arrived:
            self._arrived.extend(self._beats.get(None))
        return self._arrived.popleft()


def digest(plan: Plan, before: int = 0) -> int:
    """Return a CRC of the plan and of `before`, the digest of the plans before it.

    It is the same in every process.
    """
    fields = (
        plan.step,
        plan.uids,
        plan.table_idxs,
        plan.starts,
        plan.ends,
        plan.num_decodes,
        plan.sample_rows,
        plan.output_idxs,
        plan.late_rows,
        plan.logprob_rows,
        plan.top_rows,
        plan.num_top,
        plan.option_rows,
        plan.histories,
        plan.new_pages,
        plan.stored,
        plan.begins,
    )
    return crc32(plan.token_ids.data, crc32(msgspec.msgpack.encode(fields), before))
