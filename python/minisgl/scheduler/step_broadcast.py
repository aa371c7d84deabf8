"""The step broadcast: rank 0 sends what it received, and every rank plans the same step.

Every rank runs the same loop over a scheduler of its own. A plan is a pure function of the messages
and outcomes so far, so the ranks only need to agree on which message came in which turn::

    rank 0   | take | --turn n--> | plan | --check--> | launch | settle | take | --turn n+1--> ...
    rank r   |      <--turn n-- take | plan | <--check-- launch | settle |  <--turn n+1-- take ...

Sending plans instead would not be simpler: they are larger than the messages, and each rank would
still have to keep the state that a commit changes. The price is that planning must depend on
nothing but messages and outcomes. Otherwise ranks could launch different steps, and their
collectives would wait for each other without end. So each broadcast has a digest of all earlier
plans. With overlap a rank compares it while the last of these steps is still in flight. A
`PlanCheck` has the digest of a step's plan before its launch. Followers wait for it before they
launch, so only every 64th step has one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final
from zlib import crc32

import msgspec
from msgspec.structs import replace

from minisgl.core.plan import Executor, Flight, Plan
from minisgl.errors import EngineError
from minisgl.message import PlanCheck, StepBroadcast, StepBroadcastMsg, UserMsg
from minisgl.scheduler.io import Message, Source
from minisgl.utils.zmq import PullQueue, PushQueue

CHECK_EVERY: Final = 64
"""Steps from one check to the next, so that checks take little of a step's time. A follower cannot
launch before rank 0 has planned."""


class Leader:
    """Rank 0's source of messages and its executor. Mutable: it counts turns.

    followers: one queue for each other rank. check_every: steps from one check of the plans to the
    next; the same on all ranks.
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
        self._num_turns = 0
        self._digest = 0

    def get(self, timeout_s: float | None) -> Sequence[Message]:
        """Return the messages that have arrived (`Source`), and broadcast them."""
        messages = self._source.get(timeout_s)
        now = time.monotonic()
        plain = [_without_pixels(message) for message in messages]
        self._send(
            StepBroadcast(step=self._num_turns, now=now, digest=self._digest, messages=plain)
        )
        self._num_turns += 1
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

    def _send(self, message: StepBroadcastMsg) -> None:
        for follower in self._followers:
            follower.put([message])


class Follower:
    """Another rank's source of messages and its executor. Mutable: it counts turns.

    now: rank 0's clock in seconds, from the last broadcast.
    """

    def __init__(
        self,
        broadcasts: PullQueue[StepBroadcastMsg],
        executor: Executor,
        *,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self.now = 0.0
        self._broadcasts = broadcasts
        self._executor = executor
        self._check_every = check_every
        self._num_turns = 0
        self._digest = 0
        self._arrived: deque[StepBroadcastMsg] = deque()

    def get(self, timeout_s: float | None) -> Sequence[Message]:
        """Wait for this turn's broadcast and return its messages. Ignores `timeout_s`: rank 0
        decides how long to sleep.

        Raises EngineError if a broadcast is missing, or if rank 0 has launched other plans.
        """
        broadcast = self._next()
        if isinstance(broadcast, PlanCheck):
            raise EngineError(
                f"the ranks' plans differ: rank 0 planned step {broadcast.step}, this rank did not"
            )
        if broadcast.step != self._num_turns:
            raise EngineError(
                f"step broadcast {broadcast.step} arrived where {self._num_turns} was expected"
            )
        if broadcast.digest != self._digest:
            raise EngineError(
                f"the ranks' plans differ: before step broadcast {broadcast.step} rank 0 has "
                f"digest {broadcast.digest:08x}, this rank {self._digest:08x}"
            )
        self._num_turns += 1
        self.now = broadcast.now
        return broadcast.messages

    def launch(self, plan: Plan) -> Flight:
        """Launch the step. Raises EngineError if rank 0's check has a different digest."""
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
        self._broadcasts.close()

    def _next(self) -> StepBroadcastMsg:
        while not self._arrived:
            self._arrived.extend(self._broadcasts.get(None))
        return self._arrived.popleft()


def _without_pixels(message: Message) -> Message:
    """Return the message for the other ranks. Only rank 0 runs a vision tower."""
    if not isinstance(message, UserMsg) or not message.images:
        return message
    return replace(message, images=tuple(replace(each, pixels=b"") for each in message.images))


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
        plan.num_drafts,
        plan.next_ids,
        plan.sample_rows,
        plan.output_idxs,
        plan.late_rows,
        plan.logprob_rows,
        plan.top_rows,
        plan.num_top,
        plan.option_rows,
        [(each.row, len(each.next_ids), each.num_top) for each in plan.scored],
        [
            (row, [each.digest for each in images])
            for row, images in (*plan.images, *plan.image_begins)
        ],
        plan.pooled,
        plan.histories,
        plan.new_pages,
        plan.stored,
        plan.begins,
        plan.adapter_slots,
        plan.loads,
    )
    return crc32(plan.token_ids.data, crc32(msgspec.msgpack.encode(fields), before))
