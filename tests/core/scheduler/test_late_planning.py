"""Late planning: rank 0 receives until the step in flight is about to end."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core import SamplingParams
from minisgl.message import KeyShare, UserMsg, ids_to_bytes
from minisgl.scheduler.io import Message
from minisgl.scheduler.late_planning import LatePlanning


class Arrivals:
    """A clock, and messages that come at times. Mutable."""

    def __init__(self, *arrivals: tuple[float, Message]) -> None:
        self.arrivals = list(arrivals)
        self.now = 0.0
        self.num_waits = 0

    def get(self, timeout_s: float | None) -> Sequence[Message]:
        assert timeout_s is not None
        until = self.now + timeout_s
        if self.arrivals and self.arrivals[0][0] <= until:
            at, message = self.arrivals.pop(0)
            self.now = max(self.now, at)
            return [message]
        self.now = until
        return []

    def close(self) -> None: ...

    def waited(self) -> None:
        self.num_waits += 1


def ask(uid: int, key: int) -> UserMsg:
    return UserMsg(
        uid=uid, ids=ids_to_bytes([1]), sampling=SamplingParams(), share=KeyShare(0, key)
    )


def taken(
    world: Arrivals, flight: tuple[float, float] | None, *, for_all: bool = False
) -> list[int]:
    source = LatePlanning(world, lambda: flight, world.waited, lambda: world.now, for_all=for_all)
    return [message.uid for message in source.get(0) if isinstance(message, UserMsg)]


def test_rank_0_receives_until_the_flight_is_about_to_end() -> None:
    world = Arrivals((0.0, ask(1, key=2)), (0.010, ask(2, key=1)), (0.024, ask(3, key=2)))
    assert taken(world, (0.0, 0.025)) == [1, 2]
    assert 0.0215 < world.now <= 0.0225, "a tenth of the step before its end"
    assert world.num_waits == 1


def test_without_a_second_key_planning_does_not_wait() -> None:
    for key in (0, 1):
        world = Arrivals((0.0, ask(1, key)), (0.010, ask(2, key)))
        assert taken(world, (0.0, 0.025)) == [1]
        assert (world.now, world.num_waits) == (0.0, 0)


def test_if_all_steps_are_long_planning_waits_without_keys_too() -> None:
    world = Arrivals((0.0, ask(1, key=0)), (0.010, ask(2, key=0)), (0.059, ask(3, key=0)))
    assert taken(world, (0.0, 0.060), for_all=True) == [1, 2]
    assert 0.053 < world.now <= 0.0545


def test_planning_does_not_wait_without_a_flight_or_for_a_short_one() -> None:
    for flight in (None, (0.0, 0.002), (-1.0, 0.001)):
        world = Arrivals((0.0, ask(1, key=2)), (0.0005, ask(2, key=2)))
        assert taken(world, flight) == [1]
        assert world.num_waits == 0
