"""The scheduler's invariants, which tests check after each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.scheduler.requests import Requests


def check_books(requests: Requests) -> None:
    """Raise AssertionError if pages, locks, table rows or lengths do not add up. Slow."""
    running, waiting = requests.running, requests.waiting
    holders = [*running, *requests.leaving.values()]
    requests.cache.check([req for req in holders if req.handle])
    assert waiting == sorted(waiting, key=lambda req: req.order)
    assert running == sorted(running, key=lambda req: req.order)
    everyone = [*holders, *requests.queued]
    assert sorted(requests.by_uid) == sorted(req.uid for req in everyone)
    held = {req.table_idx for req in holders}
    table_idxs = [*requests.free_table_idxs, *(req.table_idx for req in holders)]
    assert sorted(table_idxs) == list(range(len(table_idxs)))
    needs = requests.needs
    with_needs = needs.late | needs.with_logprobs | needs.with_options | needs.tops.keys()
    assert held.issuperset(with_needs), "a row of no request needs something"
    for req in everyone:
        assert req.num_computed <= req.num_known <= req.max_len, req
        assert req.num_tokens <= req.num_known or req.ended, req
        assert 0 <= req.num_flights <= 2, req
    for req in requests.queued:
        assert (req.pages, req.handle, req.num_flights) == ([], None, 0), req
