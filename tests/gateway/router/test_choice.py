"""Which replica gets a request, in cases computed by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from minisgl_gateway.router.choice import Load, choose, cost_s, expected_s
from minisgl_gateway.router.index import PrefixIndex, noted_lengths
from minisgl_gateway.router.replica_state import ReplicaState
from minisgl_gateway.router.view import View, Views

IDLE = Load(prefill_tokens_per_s=1000)


def test_expected_time_is_queue_plus_uncached_tokens() -> None:
    load = Load(queued_tokens=500, prefill_tokens_per_s=1000)
    assert expected_s(load, 2000, 1000) == pytest.approx(0.5 + 1.0)
    assert expected_s(load, 2000, 2000) == pytest.approx((500 + 1) / 1000)


def test_running_requests_slow_an_answer_down() -> None:
    busy = Load(num_running=3, num_waiting=1, slowdown_s=0.04, prefill_tokens_per_s=1000)
    assert expected_s(busy, 100, 0) == pytest.approx(0.1)
    # Computing 50 tokens takes 0.05 s, of it and of each other; four requests cost it 0.16 s.
    assert cost_s(busy, 200, 150) == pytest.approx(0.05 + 4 * 0.05 + 4 * 0.04)
    # 0.41 s there, and 0.2 s where nothing is cached and no request is delayed.
    assert choose([busy, IDLE], 200, {0: 150}) == 1
    # 1 token computed: 0.165 s.
    assert choose([busy, IDLE], 200, {0: 200}) == 0


def test_a_prompt_that_is_computed_again_delays_running_requests() -> None:
    with_prefix = Load(queued_tokens=900, num_running=1, prefill_tokens_per_s=1000)
    idle_but_for_one = Load(num_running=1, prefill_tokens_per_s=1000)
    # 1.0 + 0.1 s with the prefix; 0.9 + 0.9 s without, 0.9 of them for the one who runs.
    assert choose([with_prefix, idle_but_for_one], 900, {0: 800}) == 0
    idle_but_for_one.num_running = 0
    assert choose([with_prefix, idle_but_for_one], 900, {0: 800}) == 1


def test_a_full_replica_starts_a_request_when_others_end() -> None:
    full = Load(
        num_running=4, max_running=4, num_waiting=2, finished_per_s=0.5, prefill_tokens_per_s=1000
    )
    assert expected_s(full, 100, 0) == pytest.approx((2 + 1) / 0.5)
    full.num_waiting = 0
    assert expected_s(full, 100, 0) == pytest.approx(1 / 0.5)
    full.num_running = 3  # a place is free
    assert expected_s(full, 100, 0) == pytest.approx(0.1)
    no_pages = Load(num_free_pages=10, page_size=16, finished_per_s=2.0, prefill_tokens_per_s=1000)
    assert expected_s(no_pages, 160, 0) == pytest.approx(0.16)
    assert expected_s(no_pages, 161, 0) == pytest.approx(0.5)
    assert expected_s(no_pages, 161, 16) == pytest.approx(0.145)


def test_a_cached_prefix_weighs_as_much_as_that_many_queued_tokens() -> None:
    # 800 cached tokens: the other is taken when more than 800 are queued before the request.
    for queued, best in ((0, 0), (799, 0), (801, 1)):
        busy = Load(queued_tokens=queued, prefill_tokens_per_s=1000)
        assert choose([busy, IDLE], 1000, {0: 800}) == best


def test_a_faster_replica_may_have_more_queued() -> None:
    fast = Load(queued_tokens=1500, prefill_tokens_per_s=4000)
    assert choose([IDLE, fast], 1000, {}) == 1


def test_among_equal_costs_the_fewest_requests_win() -> None:
    some = Load(prefill_tokens_per_s=1000, num_running=3)
    assert choose([some, IDLE, IDLE], 100, {}) == 1


def test_the_index_finds_the_longest_prefix_of_each() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add("a", [11, 12, 13])
    index.add("b", [11])
    index.add("b", [11])
    assert index.pages_held([11, 12, 13, 14]) == {"a": 3, "b": 1}
    index.remove("a", [13])
    index.remove("b", [11])
    assert index.pages_held([11, 12, 13, 14]) == {"a": 2, "b": 1}
    index.remove("b", [11])
    index.remove("a", [11, 12])
    assert index.pages_held([11]) == {}
    assert len(index) == 0


def test_sent_prefixes_are_noted_at_powers_of_two() -> None:
    assert [noted_lengths(n) for n in (0, 1, 2, 3, 8, 9)] == [
        [], [1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9],
    ]  # fmt: skip


def _state(queued: int = 0, hashes: tuple[int, ...] = ()) -> ReplicaState:
    return ReplicaState(
        page_size=16,
        num_pages=100,
        num_free_pages=100,
        num_waiting=0,
        num_running=0,
        max_running=8,
        queued_tokens=queued,
        prefill_tokens_per_s=1000,
        hashes=np.array(hashes, "<u8").tobytes(),
    )


def _two() -> tuple[Views, list[View]]:
    views, each = Views(), [View(), View()]
    for view in each:
        views.update(view, _state(), 0.0)
    return views, each


def test_sent_requests_count_until_a_state_includes_them() -> None:
    views, (a, b) = _two()
    hashes = [1, 2, 3, 4]
    assert views.choose([a, b], 64, hashes, 16, 0.0) == (a, 0)
    sent = views.send(a, 64, hashes, now=1.0)
    assert (a.load(1.0).queued_tokens, a.load(1.0).num_free_pages) == (64, 96)
    assert a.load(1.05).queued_tokens == 14, "it computes 1,000 a second"
    other = [9, 10, 11, 12]
    assert views.choose([a, b], 64, other, 16, 1.0)[0] is b, "another prompt goes elsewhere"
    assert views.cached_tokens([a, b], hashes, 16) == {0: 64}, "its prefix will be there"
    views.update(a, _state(queued=64), asked_at=1.05)
    assert a.load(1.05).queued_tokens == 128, "sent too shortly before: it may not be in the state"
    views.update(a, _state(queued=64), asked_at=2.0)
    assert a.load(2.0).queued_tokens == 64, "the state counts it"
    assert a.load(2.05).queued_tokens == 14
    assert a.load(9.0).queued_tokens == 0
    sent.started_at = 2.5
    views.update(a, _state(), asked_at=2.4)
    assert views.cached_tokens([a, b], hashes, 16) == {0: 64}, "it began after the question"
    views.update(a, _state(hashes=(3,)), asked_at=3.0)
    assert a.sent == []
    assert views.cached_tokens([a, b], hashes, 16) == {0: 48}, "as the state says"


def test_a_prompt_that_did_not_start_is_cached_nowhere() -> None:
    views, (a, b) = _two()
    sent = views.send(a, 64, [1, 2, 3, 4], now=1.0)
    views.take_back(a, sent)
    assert views.cached_tokens([a, b], [1, 2, 3, 4], 16) == {}
    assert (a.sent, len(views._index)) == ([], 0)


def test_a_session_sticks_and_a_hot_prefix_spreads() -> None:
    views, (a, b) = _two()
    views.update(b, _state(hashes=(1, 2, 3, 4)), 0.0)
    hashes = [1, 2, 3, 4, 5]
    chosen = []
    for _ in range(8):
        view, cached = views.choose([a, b], 80, hashes, 16, 0.0)
        views.send(view, 80 - cached, hashes, now=0.0)
        chosen.append(view)
    # b computes 16 tokens, then 1 each; a 80. So b's queue is 16, 17, 18, ... and never 80.
    assert chosen == [b] * 8
    views.update(b, _state(queued=100, hashes=(1, 2, 3, 4)), 0.05)
    assert views.choose([a, b], 80, hashes, 16, 0.0)[0] is a


def test_a_forgotten_replica_holds_no_prefix() -> None:
    views, (a, b) = _two()
    views.update(a, _state(hashes=(1, 2)), 0.0)
    sent = views.send(a, 10, [1, 2, 3], now=0.0)
    views.forget(a)
    assert views.cached_tokens([a, b], [1, 2, 3], 16) == {}
    views.take_back(a, sent)  # its request fails later
    assert (a.load(0.0), len(views._index)) == (Load(), 0)


def test_all_replicas_weigh_a_request_by_the_same_mean_answer() -> None:
    views, (a, b) = _two()
    served = {"row_s": 0.01, "num_finished": 10, "num_output_tokens": 200}
    views.update(a, msgspec.structs.replace(_state(hashes=(1,)), **served), 0.0)
    views.update(b, msgspec.structs.replace(_state(), row_s=0.01), 0.0)
    chosen = []
    for _ in range(6):
        view, cached = views.choose([a, b], 32, [1, 2], 16, 0.0)
        views.send(view, 32 - cached, (), now=0.0).started_at = 0.0
        chosen.append(view)
    # A request slows another by 20 tokens of 10 ms. The prefix saves 16 ms, and as much for each
    # of three that run there: less than one more does.
    assert chosen == [a, b] * 3
