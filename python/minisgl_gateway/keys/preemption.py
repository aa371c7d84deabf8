"""Preemption: a waiting request takes the place of running requests of other API keys.

It displaces only requests that come after it by priority and tag (`minisgl_gateway.keys.shares`),
whenever they arrived. So two requests never displace each other in turn. Requests of one key do
not displace each other, nor do requests without keys. The choice is a pure function of the
requests, as all planning is.

A retracted request keeps its row of the tables until its last flight is settled. The next request
takes the spare row, so it can start at once. It can also have the retracted request's pages at
once: the next owner's step is launched after the flight, which is then done with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.req import Req
from minisgl.scheduler.requests import Requests


def give_way(requests: Requests, candidates: Sequence[Req]) -> None:
    """Retract running requests so that the candidates can start in this step or the next.

    candidates: waiting requests, in order.
    """
    if requests.leaving:
        return
    num_places = requests.num_places
    starting = [req for req in requests.running if req.num_known - req.num_computed > 1]
    for req in _with_rivals(candidates, requests.running):
        if requests.waits_for_prefix(req, starting):
            continue
        has_room = _has_room(requests, req, starting)
        if has_room is None:
            continue
        num_tokens = 0 if has_room else req.num_known + 1
        victims = _victims(requests, req, num_tokens, num_places)
        if victims is None:
            return  # no later request starts before this one
        for victim in victims:
            requests.retract(victim)
            if victim.handle:
                requests.release_pages(victim)
        num_places += len(victims) - 1
        starting = [*(other for other in starting if other not in victims), req]


def _with_rivals(candidates: Sequence[Req], running: Sequence[Req]) -> Sequence[Req]:
    """Return the candidates up to the last that comes before a running request of another key.

    The others displace nothing, and to find that out by their pages takes longer than the plan.
    """
    last = running[-1].order
    other = next((req.order for req in reversed(running) if req.order.key != last.key), None)
    for index in range(len(candidates), 0, -1):
        mine = candidates[index - 1].order
        rival = other if mine.key == last.key else last
        if rival and mine.claim < rival.claim:
            return candidates[:index]
    return ()


def _has_room(requests: Requests, req: Req, starting: list[Req]) -> bool | None:
    """Return whether the free pages suffice for `req`, besides `starting` and what runs; None if
    `req` should wait for a longer prefix."""
    if requests.cache.attach(req, requests.reusable_ids(req), requests.next_step) is None:
        return None
    try:
        return requests.has_room(req, starting)
    finally:
        requests.cache.release(req)


def _victims(requests: Requests, req: Req, num_tokens: int, num_places: int) -> list[Req] | None:
    """Return the running requests whose retraction frees a place and the pages of `num_tokens`, the
    last in the order first; None if those after `req` do not suffice."""
    victims: list[Req] = []
    for victim in reversed(requests.running):
        if num_places + len(victims) > 0 and num_tokens <= 0:
            break
        if victim.order.claim <= req.order.claim:
            return None
        if victim.order.key == req.order.key:
            continue
        victims.append(victim)
        num_tokens -= victim.num_computed
    return victims if num_places + len(victims) > 0 and num_tokens <= 0 else None
